"""Answers without a reward and unreadable prompts, on a real queue."""

from rollmesh.config.rollout import RewardConfig
from rollmesh.errors import DataError, RewardUnavailable
from rollmesh.types import OutcomeKind, RewardOutcome

from ...kit.waiting import reached
from .replicas import schedule
from .scenes import whole_mesh
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedReward, answer_of


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
