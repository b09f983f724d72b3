"""Samplers in whole replicas: one that fails loses nothing, and the default is the order from before there were any."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.config.curriculum import CurriculumConfig
from rollmesh.config.data import DataConfig
from rollmesh.curriculum.prompt_tables import Draw, History, PromptTable
from rollmesh.curriculum.samplers import load_sampler
from rollmesh.rollout.prompt_supply import PromptDraws
from rollmesh.store import TrajectoryStore
from rollmesh.tasks.sources.source_protocol import SourceRows, build_prompt_source
from rollmesh.text import Tokenizer
from rollmesh.types import Prompt

from ...kit.waiting import reached
from .replicas import running, schedule
from .scenes import all_groups, check_batch, start
from .scripted import ScriptedGenerator, ScriptedPrompts, ScriptedReward

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
