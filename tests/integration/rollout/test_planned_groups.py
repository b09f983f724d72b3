"""Whole meshes of a leader that plans: prompts by a sampler, and rounds of groups."""

import asyncio
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import DataConfig
from rollmesh.curriculum.planners import OwnPlanner, Round, RoundRules
from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.curriculum.shapers import Closing
from rollmesh.group_outcome import GroupOutcome
from rollmesh.prompt_history import PromptRecord
from rollmesh.rollout.prompt_supply import PromptDraws
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore
from rollmesh.tasks.sources.source_protocol import SourceRows, build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import Batch, FinishReason, Prompt
from rollmesh.worker.program import RolloutContext, RolloutResult, SingleTurnProgram

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import all_groups, check_batch, start
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedReward


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


ROW_COUNT = 7


class ScriptedRows(ScriptedPrompts):
    """Seven rows that come again."""

    def rows(self) -> SourceRows:
        names = [f"row-{row}" for row in range(ROW_COUNT)]
        return SourceRows(names=names, domains=[""] * ROW_COUNT, endless=[False] * ROW_COUNT)

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        ids = np.array([1, 2, 3 + row], np.int32)
        return Prompt(prompt_id=f"row-{row}", token_ids=ids, verifier="exact", metadata={"index": row})


def in_turn(draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
    return draw.index % prompts.row_count


def raises_later(draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
    return in_turn(draw, prompts, history, train_step) if train_step < 1 else int(np.zeros(1)[draw.index])


def misses_later(draw: Draw, prompts: PromptTable, history: History, train_step: int) -> int:
    return in_turn(draw, prompts, history, train_step) + (prompts.row_count if train_step >= 1 else 0)


def draws(store: TrajectoryStore, function: Callable[..., int]) -> Any:
    sampler = load_sampler(CurriculumConfig(sampler=f"{__name__}:{function.__name__}"))
    assert sampler is not None
    return lambda source: PromptDraws(source, sampler, store.prompt_records, 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (raises_later, r"curriculum\.sampler=[.\w]+:raises_later: raised IndexError: index \d+ is out of bounds"),
        (misses_later, r"curriculum\.sampler=[.\w]+:misses_later named row \d+; the data has 7 rows, from 0"),
    ],
)
async def test_a_sampler_that_fails_stops_the_run_and_loses_nothing(
    store: TrajectoryStore, function: Callable[..., int], message: str
) -> None:
    """It fails after the first train step; the run continues with another sampler, at the position of the failure."""
    plan = schedule(train_steps=4)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", slots=64), keeps_history=True)
    build = partial(running, store, cluster, ScriptedReward(), plan, prompts=ScriptedRows())
    async with build(open_draws=draws(store, function)):
        check_batch(await trainer.train(1), plan)
        failure = await reached(store.leadership.failure)
        position = await store.leadership.cursor()
    assert failure.startswith(f"prompt (epoch {position.epoch}, index {position.index}): ")
    assert re.search(message, failure)
    async with build(index=1, open_draws=draws(store, in_turn)):
        for step in (2, 3, 4):
            check_batch(await trainer.train(step), plan)
    trained = all_groups(trainer)
    assert len(set(trained)) == len(trained) == 8
    batches = [group for batch in trainer.batches for group in batch.groups]
    assert {g.group_id: g.trajectories[0].prompt.prompt_id for g in batches} == {
        name: f"row-{int(name.partition('-')[2]) % ROW_COUNT}" for name in trained
    }
    counts = await store.mesh.counts()
    assert (counts.dead_letters, set(counts.drops) <= {"run_complete"}) == (0, True)
    after = await store.leadership.cursor()
    assert counts.totals["admitted_total"] == after.index, "every position up to the cursor was admitted once"


OLD_ORDER = [[10, 9, 1, 3, 5, 8, 4, 12, 7], [9, 3, 10, 1, 8, 4, 5, 12, 7], [8, 5, 3, 7, 12, 1, 4, 10, 9]]
"""Rows of three epochs of this table with seed 7, printed by the code before there were samplers."""


async def test_the_default_sampler_is_the_order_from_before_there_were_samplers(
    store: TrajectoryStore, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"w{i}", "answer": str(i)}) + "\n" for i in range(12)))
    data = DataConfig.model_validate({"source": {"type": "jsonl", "path": str(path)}, "held_out_ratio": 0.25})
    assert load_sampler(CurriculumConfig()) is None, "the leader then opens no draws"
    plan = schedule(train_steps=12)
    cluster, trainer = await start(store, plan, ScriptedGenerator("a", slots=64))
    async with (
        running(store, cluster, ScriptedReward(), plan, prompts=build_prompt_source(data, tokenizer, 7), budget=16),
        asyncio.timeout(240),
    ):
        for step in range(1, 13):
            await trainer.train(step)
    found = {g.group_id: g.trajectories[0].prompt for batch in trainer.batches for g in batch.groups}
    assert {name: prompt.prompt_id for name, prompt in found.items()} == {
        name: f"rows.jsonl:{OLD_ORDER[epoch][index]}"
        for name in found
        for epoch, index in [map(int, name[1:].split("-"))]
    }
    assert {name[:2] for name in found} == {"e0", "e1", "e2"}
