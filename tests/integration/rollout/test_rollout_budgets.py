"""Budgets by train step in whole replicas: a trajectory keeps the one of the policy it was first leased under."""

from __future__ import annotations

from typing import Any

import pytest

from rollmesh.config.rollout import RewardConfig
from rollmesh.curriculum.budgets import Budget, load_budget
from rollmesh.errors import Conflict
from rollmesh.store import TrajectoryStore
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, Prompt, Trajectory
from rollmesh.worker.known_policies import TrajectoryBudgets

from ...kit.waiting import reached
from .environment_episodes import TURN, CountingEnvironment, program_of
from .replicas import running, schedule
from .scenes import members, start, whole_mesh
from .scripted import STOP, ScriptedGenerator, ScriptedPrompts, ScriptedReward, answer_of


def stages(*values: tuple[int, int], most: int = 64) -> Budget:
    found = load_budget("token_budget", "steps", {"stages": values}, most=most, train_steps=4)
    assert found is not None
    return found


def check_lengths(trajectory: Trajectory, budget: int) -> None:
    answer = answer_of(trajectory.trajectory_id, 40)
    assert trajectory.response_ids.tolist() == answer[:budget]
    assert trajectory.finish_reason is (FinishReason.STOP if len(answer) <= budget else FinishReason.LENGTH)


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
            check_lengths(trajectory, budget(trajectory.birth_version))
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
