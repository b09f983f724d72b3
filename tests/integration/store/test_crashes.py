"""Redis, workers, leader and trainer die under load; nothing is lost and nothing is trained twice."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from pathlib import Path

import pytest

from rollmesh.mesh import ResumeOrder
from rollmesh.store import EmbeddedServer
from rollmesh.store.queue_types import StoreCounts

from .load import LoadedMesh
from .loaded_workers import Shape
from .stored_keys import read_truth

WAIT_SECONDS = 120.0
PLAIN = Shape()
SPARE_MEMBERS = Shape(spare=2, has_ranks=True, resume_order=ResumeOrder.MOST_TOKENS, cuts_shortest=True)
"""Groups are launched above needed, start by rank, continue with the most tokens first, and are cut shortest first."""
NEAREST_END = Shape(spare=1, has_ranks=True, resume_order=ResumeOrder.NEAREST_END)

FATES = ("evicted_total", "groups_restarted_total", "groups_set_aside_total", "groups_recalled_total")


def missing_fates(counts: StoreCounts) -> list[str]:
    """Return the fates that no stale group has met yet."""
    return [fate for fate in FATES if not counts.totals.get(fate)]


async def has_happened(mesh: LoadedMesh) -> bool:
    """Tell whether stale groups have met every fate, and a trajectory that rested has continued.

    Members above needed have been cut off too, and a group has overtaken an older one, where the load has such.
    """
    counts = await mesh.stores[0].mesh.counts()
    has_surplus = bool(counts.totals.get("surplus_total")) or not mesh.shape.spare
    has_overtaken = mesh.leases.overtaken > 0 or not mesh.shape.has_ranks
    has_ended = not mesh.shape.begins_again or not missing_fates(counts)
    return mesh.leases.continued > 0 and has_surplus and has_overtaken and has_ended


def wrong(account: dict[str, int]) -> dict[str, int]:
    """Return the faults of an account that are there."""
    return {fault: count for fault, count in account.items() if count}


@pytest.mark.parametrize("shape", [PLAIN, SPARE_MEMBERS, NEAREST_END], ids=["plain", "spare_members", "nearest_end"])
async def test_roles_die_at_random_and_every_group_is_trained_once(server: EmbeddedServer, shape: Shape) -> None:
    """Some groups lag until they are stale: they are evicted, restarted, or set aside and recalled meanwhile.

    Some trajectories rest until the next policy.
    """
    rng, step, run = random.Random(7), 0, f"roles-die-{shape.spare}"
    async with (
        asyncio.timeout(2 * WAIT_SECONDS),
        LoadedMesh(server.url, run, 1.5, rng, replace(shape, begins_again=True)) as mesh,
    ):
        while step < 12 or not await has_happened(mesh):
            step += 2
            await mesh.trainer.until(step, WAIT_SECONDS)
            await mesh.crash(rng.choice(["leader", "trainer", "trainer", "worker-0", "worker-1", "worker-2"]))
        await mesh.trainer.until(step + 2, WAIT_SECONDS)
        await mesh.stop()
        assert wrong(await mesh.account() | await mesh.account_of_leases()) == {}
        assert (await read_truth(mesh.stores[0])).problems == []


@pytest.mark.timeout(600)
async def test_workers_that_stall_past_their_ttl_join_no_tokens_to_those_of_others(server: EmbeddedServer) -> None:
    async with LoadedMesh(server.url, "workers-stall", 0.4, random.Random(5), PLAIN) as mesh:
        async with asyncio.timeout(2 * WAIT_SECONDS):
            for number in (0, 1, 2, 0):
                await mesh.stall_past_the_ttl(number)
        await mesh.trainer.until(mesh.trainer.step + 6, WAIT_SECONDS)
        await mesh.stop()
        assert wrong(await mesh.account() | await mesh.account_of_leases()) == {}
        assert (await read_truth(mesh.stores[0])).problems == []


@pytest.mark.parametrize(
    ("lost_bytes", "shape"),
    [
        (0, replace(SPARE_MEMBERS, begins_again=True)),
        (2_000, PLAIN),
        (40_000, replace(PLAIN, begins_again=True)),
        (40_000, replace(NEAREST_END, begins_again=True)),
    ],
    ids=["0-spare_members", "2000-plain", "40000-plain", "40000-nearest_end"],
)
async def test_redis_killed_under_load_comes_back_and_nothing_is_lost(
    own_server: EmbeddedServer, lost_bytes: int, shape: Shape
) -> None:
    rng, step = random.Random(lost_bytes), 0
    async with asyncio.timeout(2 * WAIT_SECONDS), LoadedMesh(own_server.url, "redis-dies", 0.4, rng, shape) as mesh:
        while step < 9 or not await has_happened(mesh):
            step += 3
            await mesh.trainer.until(step, WAIT_SECONDS)
            own_server.kill()
            cut_off_tail(own_server.folder, lost_bytes)
            if rng.random() < 0.5:
                await mesh.crash("trainer")
            own_server.start()
        await mesh.trainer.until(step + 3, WAIT_SECONDS)
        await mesh.stop()
        counts = await mesh.stores[0].mesh.counts()
        assert counts.totals["recoveries"] >= 1
        assert wrong(await mesh.account()) == {}
        assert (await read_truth(mesh.stores[0])).problems == []


async def test_redis_that_lost_everything_trains_no_group_twice(own_server: EmbeddedServer) -> None:
    async with LoadedMesh(own_server.url, "all-lost", 0.3, random.Random(3), SPARE_MEMBERS) as mesh:
        await mesh.trainer.until(4, WAIT_SECONDS)
        own_server.kill()
        cut_off_tail(own_server.folder, 1 << 40)
        own_server.start()
        await mesh.trainer.until(8, WAIT_SECONDS)
        await mesh.stop()
        assert wrong(await mesh.account()) == {}


def cut_off_tail(folder: Path, lost_bytes: int) -> None:
    """Damage an append-only file that is flushed once a second, as a crash of the machine does."""
    files = sorted((folder / "appendonlydir").glob("*.incr.aof"))
    size = files[-1].stat().st_size
    with files[-1].open("r+b") as file:
        file.truncate(max(0, size - lost_bytes))
