"""Tombstones and dead letters stay bounded, and the memory estimate counts prompts and snapshots."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.mesh import Cursor
from rollmesh.store import EmbeddedServer, TrajectoryStore

from .store_mesh import Mesh, group
from .stored_keys import read_truth

MOST_TOMBSTONES = 65_536


@pytest.fixture
async def small_store(own_server: EmbeddedServer) -> AsyncIterator[TrajectoryStore]:
    """On a server with 64 MiB of memory."""
    async with await TrajectoryStore.connect(StoreConfig(), run="bounded", url=own_server.url) as connected:
        yield connected


async def bury_positions(store: TrajectoryStore, count: int, step: int) -> None:
    """Tombstones of prompt positions that the cursor has passed long ago, of one train step."""
    key = store.connection.keys.single("tombstones")
    for first in range(0, count, 4096):
        words: list[str | int] = []
        for index in range(first, min(first + 4096, count)):
            words += [step, f"e0-{index}"]
        await store.connection.command("ZADD", key, *words)


async def mesh_at(store: TrajectoryStore, trained_step: int) -> Mesh:
    mesh = await Mesh.start(store)
    meta = store.connection.keys.single("meta")
    await store.connection.command("HSET", meta, "cursor_epoch", 1, "trained_step", trained_step)
    return mesh


async def drop(mesh: Mesh, count: int) -> None:
    cursor = await mesh.store.leadership.cursor()
    groups = [group(cursor.index + at, epoch=1) for at in range(count)]
    await mesh.store.leadership.admit(mesh.leader, groups, cursor, Cursor(epoch=1, index=cursor.index + count))
    assert await mesh.store.leadership.evict(mesh.leader, [g.group_id for g in groups], "stale") == count


async def tombstones(store: TrajectoryStore) -> int:
    return int(await store.connection.command("ZCARD", store.connection.keys.single("tombstones")))


async def test_tombstones_do_not_outgrow_the_drops_of_the_steps_they_are_kept_for(store: TrajectoryStore) -> None:
    mesh = await mesh_at(store, trained_step=700)
    await bury_positions(store, 1000, step=400)
    await drop(mesh, 300)
    assert await tombstones(store) == 300
    with_old_position = [group(0), group(999)]
    cursor = await store.leadership.cursor()
    assert await store.leadership.admit(mesh.leader, with_old_position, cursor, cursor) == 0, (
        "the floor knows what they knew"
    )


async def test_tombstones_are_bounded_however_many_groups_one_step_drops(store: TrajectoryStore) -> None:
    mesh = await mesh_at(store, trained_step=700)
    await bury_positions(store, MOST_TOMBSTONES, step=700)
    await drop(mesh, 40)
    assert await tombstones(store) == MOST_TOMBSTONES
    key = store.connection.keys.single("tombstones")
    assert await store.connection.command("MEMORY", "USAGE", key, "SAMPLES", 0) < 10 << 20


async def test_a_tombstone_past_the_cursor_stays_while_others_go(store: TrajectoryStore) -> None:
    mesh = await mesh_at(store, trained_step=700)
    key = store.connection.keys.single("tombstones")
    await store.connection.command("ZADD", key, 1, "e1-50", 2, "e0-3")
    await drop(mesh, 2)
    kept = {gid.decode() for gid in await store.connection.command("ZRANGE", key, 0, -1)}
    assert kept == {"e1-50", "e1-0", "e1-1"}


async def test_dead_letters_keep_to_a_share_of_the_memory(small_store: TrajectoryStore) -> None:
    store = small_store
    mesh = await Mesh.start(store)
    tokens, share = 65_536, (1 << 26) // 16
    await mesh.admit(16)
    for _ in range(32):
        (leased,) = await store.trajectories.lease(mesh.session, 1)
        name = leased.trajectory.trajectory_id
        await mesh.append(name, 0, tokens)
        await store.trajectories.fail(mesh.session, [(name, "environment gone")])
    letters = await store.dead_letters.newest()
    assert 1 < len(letters) <= share // (8 * tokens)
    newest = await store.dead_letters.get(letters[0].trajectory_id)
    assert newest.trajectory is not None and newest.trajectory.response_token_count == tokens
    counts = await store.mesh.counts()
    assert counts.totals["letters_forgotten_total"] == 32 - len(letters)
    assert (await read_truth(store)).problems == []
    for letter in letters:
        assert await store.dead_letters.delete(letter.trajectory_id)
    meta = store.connection.keys.single("meta")
    assert int(await store.connection.command("HGET", meta, "letter_bytes")) == 0


async def test_a_letter_that_is_larger_than_its_share_stays_until_the_next_one(small_store: TrajectoryStore) -> None:
    store = small_store
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 2)
    await mesh.append("e0-0.0", 0, (1 << 26) // 16 // 8)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    assert [letter.trajectory_id for letter in await store.dead_letters.newest()] == ["e0-0.0"]
    await store.trajectories.fail(mesh.session, [("e0-0.1", "broke")])
    assert [letter.trajectory_id for letter in await store.dead_letters.newest()] == ["e0-0.1"]


async def test_the_memory_estimate_counts_prompts_and_snapshots(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    groups = [group(index, prompt_tokens=100_000) for index in range(2)]
    await store.leadership.admit(mesh.leader, groups, Cursor(), Cursor(index=2))
    view = await store.mesh.view()
    assert 400_000 < view.mean_prompt_bytes < 450_000
    (leased,) = await store.trajectories.lease(mesh.session, 1)
    name = leased.trajectory.trajectory_id
    for size in (1_000, 50_000):
        assert await store.trajectories.keep_snapshot(mesh.session, name, b"s" * size)
    await mesh.finish(name, 0, 5)
    before = (await store.mesh.view()).saved_bytes_total
    await mesh.score(name, 1.0)
    assert (await store.mesh.view()).saved_bytes_total - before == 50_000
