"""Bounds: no script touches more than 512 keys, and tombstones, letters and estimates of memory stay bounded."""

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from rollmesh.config.store import StoreConfig
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import EmbeddedServer, ReleaseReason, TrajectoryStore
from rollmesh.store.scripts import MAX_KEYS_PER_SCRIPT

from .store_mesh import Mesh, group
from .stored_keys import read_truth

SIZE = 64
"""Of a group: with replacements it has 128 members."""


async def most_keys(server: EmbeddedServer, store: TrajectoryStore, act: Callable[[], Awaitable[object]]) -> int:
    """Distinct keys of the script call that touched most of them."""
    reader, writer = await asyncio.open_unix_connection(str(server.socket_path), limit=1 << 26)
    try:
        writer.write(b"MONITOR\r\n")
        assert (await reader.readline()).startswith(b"+OK")
        await act()
        await store.connection.command("ECHO", "the end of the monitored calls")
        most, keys = 0, set[str]()
        while "the end of the monitored calls" not in (line := (await reader.readline()).decode()):
            if " lua] " not in line:
                keys = set()  # the call itself, before or after its script's commands
                continue
            words = re.findall(r'"((?:[^"\\]|\\.)*)"', line)
            keys |= {word for word in words if word.startswith(store.connection.keys.prefix)}
            most = max(most, len(keys))
        return most
    finally:
        writer.close()


async def last_members(mesh: Mesh, groups: int, size: int = SIZE) -> list[str]:
    """The last unfinished member of each group, leased; all the others are dead, and no replacement is left."""
    store = mesh.store
    await mesh.admit(groups, needed=size)
    last: list[str] = []
    while leased := await store.trajectories.lease(mesh.session, 64):
        ids = [item.trajectory.trajectory_id for item in leased]
        last += [i for i in ids if i.endswith(f".{2 * size - 1}")]
        await store.trajectories.fail(mesh.session, [(i, "broke") for i in ids if i not in last])
    assert len(last) == groups
    return last


async def test_burying_the_last_members_of_large_groups_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=SIZE)
    last = await last_members(mesh, groups=4)
    used = await most_keys(server, store, lambda: store.trajectories.fail(mesh.session, [(i, "broke") for i in last]))
    assert 0 < used <= MAX_KEYS_PER_SCRIPT
    assert await most_keys(server, store, lambda: store.leadership.reap(mesh.leader)) <= MAX_KEYS_PER_SCRIPT
    assert (await store.mesh.counts()).drops == {"too_few_scored": 4}


async def test_a_lease_that_buries_members_of_large_groups_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=SIZE, max_attempts=1)
    last = await last_members(mesh, groups=4)
    await mesh.admit(1, needed=SIZE)
    await store.trajectories.release(mesh.session, last, ReleaseReason.FAILED)
    leased: list[str] = []

    async def lease() -> None:
        for _ in range(10):  # a call that has buried as many as it may brings nothing else
            leased.extend(item.trajectory.trajectory_id for item in await store.trajectories.lease(mesh.session, 64))

    assert 0 < await most_keys(server, store, lease) <= MAX_KEYS_PER_SCRIPT
    assert len(leased) == SIZE and not set(leased) & set(last)
    await store.leadership.reap(mesh.leader)
    assert (await store.mesh.counts()).drops == {"too_few_scored": 4}


async def rest(mesh: Mesh, first: int, count: int) -> list[str]:
    """Lease the only member of each of so many new groups, the first of index ``first``, and save a token of each."""
    await mesh.admit(count, needed=1)
    ids = [f"e0-{first + at}.0" for at in range(count)]
    leased = await mesh.store.trajectories.lease(mesh.session, count)
    assert [item.trajectory.trajectory_id for item in leased] == ids
    for trajectory_id in ids:
        await mesh.append(trajectory_id, 0, 1)
    return ids


async def test_a_lease_that_wakes_takes_and_buries_as_much_as_it_may_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    """It leases 63 partial trajectories, buries the last member of a large group after them, and wakes others."""
    mesh = await Mesh.start(store, pool_size=10_000, group_size=SIZE, max_attempts=1)
    partial = await rest(mesh, 0, 63)
    (last,) = await last_members(mesh, groups=1)
    await mesh.append(last, 0, 1)
    resting = await rest(mesh, 64, 64) + await rest(mesh, 128, 64)
    await store.trajectories.release(mesh.session, [last], ReleaseReason.FAILED)
    assert await mesh.lease_ids(1) == [last]
    await store.trajectories.release(mesh.session, [last], ReleaseReason.FAILED)
    await store.trajectories.release(mesh.session, partial, ReleaseReason.DRAINED)
    await store.trajectories.release(mesh.session, resting, ReleaseReason.RESTED)
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=10_000, rest_before_step=1))
    leased: list[str] = []

    async def lease() -> None:
        leased.extend(item.trajectory.trajectory_id for item in await store.trajectories.lease(mesh.session, 64))

    assert 0 < await most_keys(server, store, lease) <= MAX_KEYS_PER_SCRIPT
    assert leased == partial
    counts = await store.mesh.counts()
    assert (counts.drops, counts.trajectories["partial"], counts.trajectories["resting"]) == (
        {"too_few_scored": 1},
        64,
        64,
    )


async def test_a_restart_in_many_large_groups_keeps_to_the_bound(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=SIZE)
    await mesh.admit(16, needed=SIZE)
    await mesh.lease_all()
    ids = [f"e0-{index}.0" for index in range(16)]
    for trajectory_id in ids:
        await mesh.append(trajectory_id, 0, 3)
    await mesh.append("e0-3.1", 0, 3)
    assert (
        0 < await most_keys(server, store, lambda: store.trajectories.restart(mesh.session, ids)) <= MAX_KEYS_PER_SCRIPT
    )
    with_tokens = [g.group_id for g in (await store.mesh.view()).stalest_open if g.min_train_step is not None]
    assert with_tokens == ["e0-3"]


async def test_a_group_that_is_too_large_for_one_call_is_swept_in_slices(
    server: EmbeddedServer, store: TrajectoryStore
) -> None:
    mesh = await Mesh.start(store, pool_size=10_000, group_size=300)
    await mesh.admit(1, needed=300)
    await store.trajectories.lease(mesh.session, 64)
    await mesh.append("e0-0.7", 0, 5)
    await store.trajectories.release(mesh.session, [f"e0-0.{member}" for member in range(64)], ReleaseReason.DRAINED)
    await mesh.admit(1, needed=300)

    async def end_the_first() -> None:
        while ids := [
            item.trajectory.trajectory_id
            for item in await store.trajectories.lease(mesh.session, 64)
            if item.trajectory.group_id == "e0-0"
        ]:
            await store.trajectories.fail(mesh.session, [(i, "broke") for i in ids])

    assert 0 < await most_keys(server, store, end_the_first) <= MAX_KEYS_PER_SCRIPT
    assert (await store.mesh.view()).open_groups == 1
    assert sorted(await store.mesh.live_groups()) == ["e0-0", "e0-1"], "until it is swept the audit does not miss it"
    assert 0 < await most_keys(server, store, lambda: store.leadership.reap(mesh.leader)) <= MAX_KEYS_PER_SCRIPT
    assert await store.mesh.live_groups() == ["e0-1"]
    (drop,) = await store.ledger.drops()
    assert (drop.group_id, drop.reason, drop.token_count) == ("e0-0", "too_few_scored", 5)
    counts = await store.mesh.counts()
    assert counts.trajectories["dead"] == 0
    assert (counts.drops, counts.dropped_tokens) == ({"too_few_scored": 1}, {"dead": 5, "too_few_scored": 0})


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
    mesh = await Mesh.start(store, groups=1, leased=2)
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
