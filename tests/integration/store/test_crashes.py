"""Redis, workers, leader and trainer die under load; nothing is lost and nothing is trained twice."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from rollmesh.store import EmbeddedServer
from rollmesh.store.queue_types import StoreCounts

from .load import LoadedMesh
from .stored_keys import read_truth

WAIT_SECONDS = 120.0
NOTHING_WRONG = {"lost": 0, "trained_twice": 0, "violations": 0, "of_two_writers": 0}


FATES = ("evicted_total", "groups_restarted_total", "groups_set_aside_total", "groups_recalled_total")


def missing_fates(counts: StoreCounts) -> list[str]:
    """What has not happened to any stale group yet."""
    return [fate for fate in FATES if not counts.totals.get(fate)]


async def has_happened(mesh: LoadedMesh) -> bool:
    """Tell whether stale groups have met every fate, and a trajectory that rested has continued."""
    return mesh.rests.continued > 0 and not missing_fates(await mesh.stores[0].mesh.counts())


async def test_roles_die_at_random_and_every_group_is_trained_once(server: EmbeddedServer) -> None:
    """Some groups lag until they are stale: they are evicted, restarted, or set aside and recalled meanwhile.

    Some trajectories rest until the next policy.
    """
    rng, step = random.Random(7), 0
    async with (
        asyncio.timeout(2 * WAIT_SECONDS),
        LoadedMesh(server.url, "roles-die", 1.5, rng, begins_again=True) as mesh,
    ):
        while step < 12 or not await has_happened(mesh):
            step += 2
            await mesh.trainer.until(step, WAIT_SECONDS)
            await mesh.crash(rng.choice(["leader", "trainer", "trainer", "worker-0", "worker-1", "worker-2"]))
        await mesh.trainer.until(step + 2, WAIT_SECONDS)
        await mesh.stop()
        assert await mesh.account() == NOTHING_WRONG
        assert (await read_truth(mesh.stores[0])).problems == []


async def test_workers_that_stall_past_their_ttl_join_no_tokens_to_those_of_others(server: EmbeddedServer) -> None:
    async with LoadedMesh(server.url, "workers-stall", 0.4, random.Random(5)) as mesh:
        async with asyncio.timeout(WAIT_SECONDS):
            for number in (0, 1, 2, 0):
                await mesh.stall_past_the_ttl(number)
        await mesh.trainer.until(mesh.trainer.step + 6, WAIT_SECONDS)
        await mesh.stop()
        assert await mesh.account() == NOTHING_WRONG
        assert (await read_truth(mesh.stores[0])).problems == []


@pytest.mark.parametrize("lost_bytes", [0, 2_000, 40_000])
async def test_redis_killed_under_load_comes_back_and_nothing_is_lost(
    own_server: EmbeddedServer, lost_bytes: int
) -> None:
    rng = random.Random(lost_bytes)
    async with LoadedMesh(own_server.url, "redis-dies", 0.4, rng) as mesh:
        for step in (3, 6, 9):
            await mesh.trainer.until(step, WAIT_SECONDS)
            own_server.kill()
            cut_off_tail(own_server.folder, lost_bytes)
            if rng.random() < 0.5:
                await mesh.crash("trainer")
            own_server.start()
        await mesh.trainer.until(12, WAIT_SECONDS)
        await mesh.stop()
        counts = await mesh.stores[0].mesh.counts()
        assert counts.totals["recoveries"] >= 1
        assert await mesh.account() == NOTHING_WRONG
        assert (await read_truth(mesh.stores[0])).problems == []


async def test_redis_that_lost_everything_trains_no_group_twice(own_server: EmbeddedServer) -> None:
    async with LoadedMesh(own_server.url, "all-lost", 0.3, random.Random(3)) as mesh:
        await mesh.trainer.until(4, WAIT_SECONDS)
        own_server.kill()
        cut_off_tail(own_server.folder, 1 << 40)
        own_server.start()
        await mesh.trainer.until(8, WAIT_SECONDS)
        await mesh.stop()
        assert await mesh.account() == NOTHING_WRONG


def cut_off_tail(folder: Path, lost_bytes: int) -> None:
    """Damage an append-only file that is flushed once a second, as a crash of the machine does."""
    files = sorted((folder / "appendonlydir").glob("*.incr.aof"))
    size = files[-1].stat().st_size
    with files[-1].open("r+b") as file:
        file.truncate(max(0, size - lost_bytes))
