"""Reads of a trainer at the end of a stage: the tokens that it has not read before, and no others."""

from __future__ import annotations

import numpy as np

from rollmesh.store import Append, TrajectoryStore
from rollmesh.store.payload import INLINE_LIMIT_BYTES

from .store_mesh import Mesh, known, segment

CHUNK = 3000


async def output_bytes(store: TrajectoryStore) -> int:
    info = await store.connection.command("INFO", "stats")
    return int(info["total_net_output_bytes"])


async def test_a_stage_end_reads_only_the_tokens_that_came_since_the_last_one(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    names = [leased.trajectory.trajectory_id for leased in await store.trajectories.lease(mesh.session, 4)]
    for name in names[:3]:
        for offset in range(0, 10 * CHUNK, CHUNK):
            await mesh.append(name, offset, CHUNK)
    first = await store.unclaimed.read({})
    assert list(first) == names[:3]
    before = await output_bytes(store)
    again = await store.unclaimed.read(first)
    assert all(again[name] is first[name] for name in names[:3]) and len(again) == 3
    assert await output_bytes(store) - before < 10_000, "nothing has changed, so no tokens are read"

    await mesh.append(names[0], 10 * CHUNK, CHUNK)
    await mesh.append(names[3], 0, 5)
    before = await output_bytes(store)
    now = await store.unclaimed.read(again)
    assert CHUNK * 4 < await output_bytes(store) - before < 2 * CHUNK * 8 + 10_000, "one chunk of 3,000 tokens"
    assert [now[name] is again.get(name) for name in names] == [False, True, True, False]
    whole = await store.unclaimed.read({})
    for name in names:
        ours, theirs = now[name].trajectory, whole[name].trajectory
        assert np.array_equal(ours.response_ids, theirs.response_ids)
        assert ours.response_token_count == theirs.response_token_count
        assert [len(s) for s in ours.segments] == [len(s) for s in theirs.segments]
        assert now[name].elements == whole[name].elements and now[name].digests == whole[name].digests


async def test_a_trajectory_that_began_again_is_read_whole_though_it_is_as_long_as_before(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 1)
    await mesh.append("e0-0.0", 0, 8)
    await mesh.append("e0-0.0", 8, 4)
    seen = await store.unclaimed.read({})
    await store.trajectories.restart(mesh.session, ["e0-0.0"])
    assert await store.unclaimed.read(seen) == {}
    begun = await known(store, "e0-0.0", 0)
    other = Append(trajectory_id="e0-0.0", token_offset=0, segments=[segment(8, start=77)], **begun)
    await store.trajectories.append(mesh.session, [other])
    await mesh.append("e0-0.0", 8, 4)
    now = await store.unclaimed.read(seen)
    assert now["e0-0.0"].trajectory.response_token_count == seen["e0-0.0"].trajectory.response_token_count
    expected = np.concatenate([other.segments[0].token_ids, segment(4, 0, 8).token_ids])
    assert np.array_equal(now["e0-0.0"].trajectory.response_ids, expected)


async def test_linked_chunks_are_read_once_too(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 1)
    large = INLINE_LIMIT_BYTES // 4
    await mesh.append("e0-0.0", 0, large)
    seen = await store.unclaimed.read({})
    await mesh.append("e0-0.0", large, 6)
    before = await output_bytes(store)
    now = await store.unclaimed.read(seen)
    assert await output_bytes(store) - before < 10_000
    assert now["e0-0.0"].trajectory.response_token_count == large + 6


async def test_a_group_that_leaves_the_queue_is_not_unclaimed_any_more(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await mesh.complete_all()
    seen = await store.unclaimed.read({})
    assert len(seen) == 4
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    now = await store.unclaimed.read(seen)
    assert list(now) == ["e0-1.0", "e0-1.1"] and all(now[i] is seen[i] for i in now)
