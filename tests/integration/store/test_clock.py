"""The clock of the Redis host is set back by an hour: every time that the queue has stored lies an hour ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rollmesh.store import TrajectoryStore
from rollmesh.types import GeneratorRecord

from .store_mesh import Mesh

TTL = 0.2
HOUR_MS = 3_600_000


async def set_back(store: TrajectoryStore) -> None:
    """Let every stored time lie an hour ahead of the server's clock."""
    keys, command = store.connection.keys, store.connection.command
    meta = keys.single("meta")
    for field in ("leader_since", "leader_until", "quiet_until", "recovering_until"):
        value = await command("HGET", meta, field)
        if value is not None:
            await command("HSET", meta, field, int(value) + HOUR_MS)
    for key in (keys.single("sessions"), keys.single("generator_expiry")):
        for name in await command("ZRANGE", key, 0, -1):
            await command("ZINCRBY", key, HOUR_MS, name)


async def soon(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + 60
    while not await condition():
        assert time.monotonic() < deadline, "held up by the clock"
        await asyncio.sleep(0.02)


async def test_a_clock_that_was_set_back_does_not_hold_up_reaping(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=TTL)
    await mesh.admit(2)
    assert len(await store.trajectories.lease(mesh.session, 4)) == 4
    await set_back(store)

    async def reaped() -> bool:
        return await store.leadership.reap(mesh.leader) == 4

    await soon(reaped)
    assert (await store.mesh.view()).leased == 0


async def test_a_clock_that_was_set_back_does_not_hold_up_the_end_of_a_recovery(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=TTL)
    await mesh.admit(2)
    assert len(await store.trajectories.lease(mesh.session, 4)) == 4
    await store.training.close_session(mesh.trainer)
    await store.connection.command("HSET", store.connection.keys.single("meta"), "run_id", "another")
    assert await store.recovery.begin()
    await set_back(store)

    async def reaped() -> bool:
        return await store.leadership.reap(mesh.leader) == 4

    await soon(reaped)


async def test_a_clock_that_was_set_back_does_not_keep_a_dead_leader_in_the_lead(store: TrajectoryStore) -> None:
    await Mesh.start(store, session_ttl_seconds=TTL)
    await set_back(store)

    async def leads() -> bool:
        return await store.leadership.acquire("another") is not None

    await soon(leads)


async def test_a_clock_that_was_set_back_does_not_keep_a_dead_generator_in_the_registry(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, session_ttl_seconds=TTL)
    dead = GeneratorRecord(
        instance_id="dead",
        address="dead:1",
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=8,
        kv_token_capacity=1024,
        serving=True,
    )
    await store.generators.register(dead, TTL)
    await set_back(store)

    async def forgotten() -> bool:
        await store.leadership.reap(mesh.leader)
        return not await store.generators.live() and (await store.mesh.view()).registered_generators == 0

    await soon(forgotten)
