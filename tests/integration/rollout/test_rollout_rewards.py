"""Answers without a reward, unreadable prompts and budgets by train step, on a real queue."""

from typing import Any

import pytest

from rollmesh.config.rollout import RewardConfig
from rollmesh.curriculum.budgets import Budget, load_budget
from rollmesh.errors import Conflict, DataError, RewardUnavailable
from rollmesh.store import TrajectoryStore
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome, Trajectory
from rollmesh.worker.known_policies import TrajectoryBudgets

from ...kit.waiting import reached
from .environment_episodes import TURN, CountingEnvironment, program_of
from .replicas import running, schedule
from .scenes import members, start, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedPrompts, ScriptedReward, answer_of


class BadPrompts(ScriptedPrompts):
    def prompt(self, epoch, index):
        if index >= 3:
            raise DataError("data.jsonl line 4: no field 'prompt'")
        return super().prompt(epoch, index)


async def paused(store):
    return (await store.leadership.desired()).paused


def without_a_value(kind, message):
    """Rewards of which the first member of every group has none."""

    def outcome(trajectory):
        if trajectory.member_index == 0:
            return RewardOutcome(kind=kind, message=message)
        return RewardOutcome(kind=OutcomeKind.SCORED, value=float(trajectory.member_index))

    return ScriptedReward(outcome)


async def test_outcomes_without_a_value_follow_the_policy_of_the_run(store):
    reward = without_a_value(OutcomeKind.VERIFIER_ERROR, "no")
    config = RewardConfig(on_error="fixed", fixed_value=-2.0)
    async with whole_mesh(store, ScriptedGenerator("a"), reward=reward, reward_config=config) as run:
        batch = await run.trainer.train(1)
    for group in batch.groups:
        rewards = {t.member_index: t.shaped_reward for t in group.trajectories}
        assert rewards == {0: -2.0, 1: 1.0, 2: 2.0, 3: 3.0}
        assert group.trajectories[0].outcome.kind is OutcomeKind.VERIFIER_ERROR


async def test_an_unscorable_member_is_replaced(store):
    reward = without_a_value(OutcomeKind.TIMED_OUT, "slow")
    async with whole_mesh(store, ScriptedGenerator("a"), reward=reward) as run:
        batch = await run.trainer.train(1)
        assert run.value("rollmesh_rollout_trajectories_dropped_total", reason="unscorable") >= 2
    for group in batch.groups:
        assert sorted(t.member_index for t in group.trajectories) == [1, 2, 3, 4]


async def test_an_answer_without_a_value_becomes_a_dead_letter_with_its_tokens_where_the_run_says_so(store):
    reward = without_a_value(OutcomeKind.TIMED_OUT, "10 s")
    config = RewardConfig(on_timeout="dead_letter")
    async with whole_mesh(store, ScriptedGenerator("a"), reward=reward, reward_config=config) as run:
        batch = await run.trainer.train(1)
    for group in batch.groups:
        assert sorted(t.member_index for t in group.trajectories) == [1, 2, 3, 4]
    letters = [await store.dead_letters.get(letter.trajectory_id) for letter in await store.dead_letters.newest()]
    assert sorted(letter.trajectory_id for letter in letters) == ["e0-0.0", "e0-1.0"]
    for letter in letters:
        assert letter.reason == "timed_out: 10 s"
        assert letter.trajectory.response_ids.tolist() == answer_of(letter.trajectory_id, 40)


async def test_an_unreachable_reward_service_is_waited_for_and_bad_metadata_is_no_reward(store):
    class Away(ScriptedReward):
        calls = 0

        async def score(self, trajectories):
            self.calls += 1
            if self.calls <= 3:
                raise RewardUnavailable("no reward service")
            if trajectories[0].member_index == 0:
                raise DataError("metadata.answer: cannot travel")
            return await super().score(trajectories)

    config = RewardConfig(on_error="fixed", fixed_value=-1.0)
    async with whole_mesh(store, ScriptedGenerator("a"), reward=Away(), reward_config=config) as run:
        batch = await run.trainer.train(1)
    first = [t for g in batch.groups for t in g.trajectories if t.member_index == 0]
    assert {t.outcome.message for t in first} == {"metadata.answer: cannot travel"}
    assert {t.shaped_reward for t in first} == {-1.0}


async def test_a_bad_row_fails_the_run_with_its_place_and_stops_the_mesh(store):
    async with whole_mesh(store, ScriptedGenerator("a"), plan=schedule("copris", train_steps=3), prompts=BadPrompts()):
        failure = await reached(store.leadership.failure)
        assert "index 3" in failure
        assert "line 4: no field 'prompt'" in failure
        await reached(lambda: paused(store))
    assert await store.leadership.failure() == ""


def stages(*values: tuple[int, int], most: int = 64) -> Budget:
    found = load_budget("token_budget", "steps", {"stages": values}, most=most, train_steps=4)
    assert found is not None
    return found


async def test_a_trajectory_keeps_its_budget_in_another_worker_and_under_another_policy(store: TrajectoryStore) -> None:
    budget = stages((0, 24), (1, 3))
    options: dict[str, Any] = {"token_budget": budget, "chunk": 4}
    async with whole_mesh(store, ScriptedGenerator("a", seconds_per_token=0.02), steps=2, **options) as first:
        await reached(lambda: first.value("rollmesh_rollout_sampled_tokens_total", age="0") >= 20)
        await first.stop()
        assert (await store.mesh.view()).partial > 0
        await first.trainer.announce(1)
        async with running(store, first.cluster, ScriptedReward(), first.plan, index=1, **options):
            batches = [await first.trainer.train(1), await first.trainer.train(2)]
    resumed = 0
    for batch in batches:
        for trajectory in members(batch):
            answer, most = answer_of(trajectory.trajectory_id, 40), budget(trajectory.birth_version)
            assert trajectory.response_ids.tolist() == answer[:most]
            assert trajectory.finish_reason is (FinishReason.STOP if len(answer) <= most else FinishReason.LENGTH)
            resumed += trajectory.policy_versions == (0, 1) and len(trajectory.response_ids) > budget(1)
    assert resumed


async def test_the_overlong_penalty_is_relative_to_the_budget_of_the_trajectory(store: TrajectoryStore) -> None:
    penalty = RewardConfig(overlong_buffer_tokens=5)
    async with whole_mesh(store, ScriptedGenerator("a"), token_budget=stages((0, 10)), reward_config=penalty) as run:
        batch = await run.trainer.train(1)
    for trajectory in members(batch):
        lost = min(max(len(trajectory.response_ids) - 5, 0) / 5, 1)
        assert trajectory.outcome is not None
        assert trajectory.shaped_reward == pytest.approx(trajectory.outcome.value - lost)


async def test_turns_follow_the_budget_of_turns(store: TrajectoryStore, tokenizer: Tokenizer) -> None:
    budget = stages((0, 2), (1, 1))
    program = program_of(CountingEnvironment, tokenizer, [])
    async with whole_mesh(
        store, ScriptedGenerator("a", stop_every=TURN), steps=2, program=program, chunk=4, turn_budget=budget
    ) as run:
        batches = [await run.trainer.train(1), await run.trainer.train(2)]
    trained = [member for batch in batches for member in members(batch)]
    assert len(trained) == 2 * run.plan.pool_size
    for trajectory in trained:
        # A trajectory of the second batch may have been leased just before its policy was announced.
        assert trajectory.response_ids.tolist().count(STOP) == budget(trajectory.birth_version)
        assert trajectory.finish_reason is FinishReason.LENGTH


async def test_a_budget_of_a_version_that_was_never_announced_is_an_error(store: TrajectoryStore) -> None:
    plan = schedule("sync", train_steps=1)
    await start(store, plan, ScriptedGenerator("a"))
    budgets = TrajectoryBudgets(store.policies, 64, stages((0, 24)))
    prompt: Prompt = ScriptedPrompts().prompt(0, 0)
    for version, tokens in ((0, 24), (9, None)):
        trajectory = Trajectory(
            trajectory_id="e0-0.0", group_id="e0-0", member_index=0, prompt=prompt, birth_version=version
        )
        if tokens is not None:
            assert (await budgets.of(trajectory)).tokens == tokens
            continue
        with pytest.raises(Conflict, match="policy version 9 was never announced"):
            await budgets.of(trajectory)
