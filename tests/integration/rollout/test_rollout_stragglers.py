"""Trajectories that hold up the batch: one that never ends, and ones whose tokens are not saved before the end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from rollmesh.store import TrajectoryStore
from rollmesh.types import Chunk, GenerationCall

from .replicas import running, schedule
from .scenes import all_groups, check_batch, start
from .scripted import ScriptedGenerator, ScriptedReward


class StuckOnOne(ScriptedGenerator):
    """Never answers the call of one trajectory."""

    async def generate(self, call: GenerationCall) -> AsyncGenerator[Chunk, None]:
        if call.trajectory_id == "e0-0.1":
            await asyncio.Event().wait()
        async for chunk in super().generate(call):
            yield chunk


@pytest.mark.parametrize("preset", ["sync", "one_step_off"])
async def test_one_stuck_trajectory_halts_no_batch_for_longer_than_the_straggler_timeout(
    store: TrajectoryStore, preset: str
) -> None:
    # The groups beside the stuck one must end within this time, or they are evicted too.
    plan = schedule(preset, train_steps=2, straggler_timeout_seconds=2.0)
    cluster, trainer = await start(store, plan, StuckOnOne("a"))
    # A short grace: the drain waits for the stuck call until it is cut off.
    async with running(store, cluster, ScriptedReward(), plan, grace=0.5):
        for step in (1, 2):
            check_batch(await trainer.train(step), plan)
    assert "e0-0" not in all_groups(trainer)
    assert (await store.ledger.dropped_groups())["e0-0"] == "straggler_timeout"
