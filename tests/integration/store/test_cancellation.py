"""A cancelled task that talks to the queue ends, whenever the cancellation arrives."""

from __future__ import annotations

import asyncio
import random

from rollmesh.store import TrajectoryStore


async def test_a_cancelled_caller_always_ends(store: TrajectoryStore) -> None:
    delays = random.Random(0)

    async def call_forever() -> None:
        while True:
            await store.recovery.server_run_id()
            await asyncio.sleep(0.0005)

    for _ in range(200):
        task = asyncio.create_task(call_forever())
        await asyncio.sleep(0.004 * delays.random())
        task.cancel()
        done, _ = await asyncio.wait({task}, timeout=60.0)
        assert done, "the cancellation was swallowed"
        assert task.cancelled()
