"""A cancelled task that talks to the queue ends, whenever the cancellation arrives."""

from __future__ import annotations

import asyncio
import random

import pytest

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


async def test_a_caller_that_is_cancelled_while_its_connection_is_released_leaks_none(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, pool = store.connection, store.connection.client.connection_pool
    await connection.commands([("PING",)])
    monkeypatch.setattr("rollmesh.store.redis_connection._MOST_IDLE", 0)
    async with asyncio.timeout(60):
        async with pool._lock:
            task = asyncio.create_task(connection.commands([("PING",)]))
            while not pool._lock._waiters:
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.wait({task})
        assert task.cancelled()
        while pool._in_use_connections - set(connection._idle):
            await asyncio.sleep(0)
