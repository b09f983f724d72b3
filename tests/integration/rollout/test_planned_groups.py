"""Rounds in whole replicas: planners and group shapers decide, whatever leader or worker dies between two rounds."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.curriculum.planners import OwnPlanner, Round, RoundRules
from rollmesh.curriculum.shapers import Closing
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.types import Batch, FinishReason
from rollmesh.worker.program import RolloutContext, RolloutResult, SingleTurnProgram

from .replicas import running, schedule
from .scenes import all_groups, start
from .scripted import ScriptedGenerator, ScriptedReward


@dataclass(frozen=True)
class TwoRounds:
    """Two rounds for the groups with an even number, one for the others."""

    def first(self, seen: PromptRecord | None, group_size: int) -> Round:
        return Round(needed=group_size, launched=group_size, plan={"round": 0})

    def next(self, group: GroupOutcome) -> Round | None:
        if group.round or int(group.group_id.partition("-")[2]) % 2:
            return None
        return Round(needed=len(group.members) + 2, launched=2, plan={"round": 1})


def half_of_the_last(group: GroupOutcome, records: Mapping[str, PromptRecord]) -> Closing:
    """Shorten the last answer to half of its tokens and take a quarter of a point from it."""
    rewards = [member.shaped_reward for member in group.members]
    kept = [member.token_count for member in group.members]
    rewards[-1] -= 0.25
    kept[-1] = -(-kept[-1] // 2)
    return Closing(shaped_rewards=tuple(rewards), kept_tokens=tuple(kept))


def rules(plan: Schedule, **changes: Any) -> RoundRules:
    found = RoundRules(
        planner=TwoRounds(),
        shaper=half_of_the_last,
        planner_name="mine:two_rounds",
        group_size=plan.group_size,
        spare_members=0,
        most_members=2 * plan.group_size,
    )
    return replace(found, **changes)


ROUNDS = {"has_rounds": True, "keeps_history": True}


class PlannedProgram(SingleTurnProgram):
    """Notes the plan of every trajectory that it runs."""

    def __init__(self) -> None:
        self.plans: dict[str, Mapping[str, Any]] = {}

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        self.plans[rollout.active.trajectory_id] = rollout.plan
        return await super().run(rollout)


def check_rounds(batch: Batch) -> None:
    for group in batch.groups:
        two_rounds = int(group.group_id.partition("-")[2]) % 2 == 0
        numbers = [t.member_index for t in group.trajectories]
        assert numbers == list(range(6 if two_rounds else 4)), group.group_id
        last = group.trajectories[-1]
        assert last.shaped_reward == last.member_index % 2 - 0.25
        sampled = last.response_token_count + last.cut_token_count
        assert last.response_token_count == -(-sampled // 2)
        cut_short = last.cut_token_count > 0
        assert last.finish_reason is (FinishReason.LENGTH if cut_short else FinishReason.STOP)
        assert sum(len(s.behavior_logprobs) for s in last.segments if s.behavior_logprobs is not None) == (
            last.response_token_count
        )


async def test_groups_of_two_rounds_are_trained_with_the_members_of_both(store: TrajectoryStore) -> None:
    plan = schedule(train_steps=3)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", slots=64), **ROUNDS)
    program = PlannedProgram()
    async with running(store, cluster, ScriptedReward(), plan, rounds=rules(plan), program=program):
        for step in (1, 2, 3):
            check_rounds(await trainer.train(step))
    trained = [t for batch in trainer.batches for group in batch.groups for t in group.trajectories]
    assert {t.trajectory_id: program.plans[t.trajectory_id]["round"] for t in trained} == {
        t.trajectory_id: t.member_index // 4 for t in trained
    }
    counts = await store.mesh.counts()
    assert counts.totals["groups_extended_total"] >= 1
    assert counts.dropped_tokens["shortened"] >= sum(t.cut_token_count for t in trained)


async def test_a_planner_that_fails_stops_the_run_and_its_group_waits(store: TrajectoryStore) -> None:
    class Fails(TwoRounds):
        def next(self, group: GroupOutcome) -> Round | None:
            raise ZeroDivisionError("no answer was right")

    plan = schedule(train_steps=2)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", slots=64), **ROUNDS)
    broken = rules(plan, planner=OwnPlanner("curriculum.planner=mine:two_rounds", Fails()))
    async with running(store, cluster, ScriptedReward(), plan, rounds=broken), asyncio.timeout(120):
        while not (failure := await store.leadership.failure()):
            await cluster.register()
            await asyncio.sleep(0.02)
    assert failure.startswith("curriculum.planner=mine:two_rounds: raised ZeroDivisionError: no answer was right (")
    view = await store.mesh.view()
    assert view.undecided_groups > 0 and view.open_groups >= view.undecided_groups
    async with running(store, cluster, ScriptedReward(), plan, index=1, rounds=rules(plan)):
        check_rounds(await trainer.train(1))
        check_rounds(await trainer.train(2))
    assert len(set(all_groups(trainer))) == 4
