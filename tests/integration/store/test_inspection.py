"""Reads of single trajectories on a real server: pages, records, histories, and what is not in a batch yet."""

import numpy as np
import pytest

from rollmesh.errors import DataError
from rollmesh.store import Append, ReleaseReason, TrajectoryStore, inspection
from rollmesh.store.inspection import TrajectoryMark
from rollmesh.store.payload import INLINE_LIMIT_BYTES

from .store_mesh import Mesh, known, policy, segment
from .test_restarted_groups import train_one_step


async def read_all(store: TrajectoryStore, state: str | None, limit: int) -> list[TrajectoryMark]:
    found: list[TrajectoryMark] = []
    cursor: str | None = None
    for _ in range(200):
        page, cursor = await store.inspection.trajectory_page(state, cursor, limit)
        assert len(page) <= limit
        found += page
        if cursor is None:
            return found
    raise AssertionError("the pages do not come to an end")


async def populated(store: TrajectoryStore) -> Mesh:
    """Six groups of two: two cut, one ready, one with a leased and a partial one, one half scored, one pending."""
    mesh = await Mesh.start(store, groups=3, completed=True)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await mesh.admit(3)
    leased = await store.trajectories.lease(mesh.session, 4)
    assert [item.trajectory.trajectory_id for item in leased] == ["e0-3.0", "e0-3.1", "e0-4.0", "e0-4.1"]
    await mesh.append("e0-3.0", 0, 4)
    await mesh.append("e0-3.1", 0, 3)
    await store.trajectories.release(mesh.session, ["e0-3.1"], "drained")
    await mesh.complete(leased[2], 1.0)
    await mesh.finish("e0-4.1", 0, 5)
    return mesh


@pytest.mark.parametrize("limit", [1, 2, 5, 500])
async def test_pages_of_any_size_together_are_the_whole_queue(store: TrajectoryStore, limit: int) -> None:
    await populated(store)
    states = {mark.trajectory_id: mark.state for mark in await read_all(store, None, limit)}
    assert states == {
        "e0-0.0": "scored", "e0-0.1": "scored", "e0-1.0": "scored", "e0-1.1": "scored",
        "e0-2.0": "scored", "e0-2.1": "scored", "e0-3.0": "leased", "e0-3.1": "partial",
        "e0-4.0": "scored", "e0-4.1": "finished", "e0-5.0": "pending", "e0-5.1": "pending",
    }  # fmt: skip
    for state in ("pending", "partial", "leased", "finished", "scored", "dead"):
        rows = await read_all(store, state, limit)
        assert {mark.trajectory_id for mark in rows} == {i for i, s in states.items() if s == state}, state


@pytest.mark.parametrize("limit", [1, 2, 5, 500])
async def test_trajectories_that_rest_since_the_same_step_are_all_listed(store: TrajectoryStore, limit: int) -> None:
    mesh = await Mesh.start(store, groups=5)
    ids = await mesh.lease_ids(10)
    for version, half in enumerate((ids[:5], ids[5:])):
        if version:
            await store.policies.announce(mesh.trainer, policy(version))
        for trajectory_id in half:
            await mesh.append(trajectory_id, 0, 4, version)
        await store.trajectories.release(mesh.session, half, ReleaseReason.RESTED)
    assert [mark.trajectory_id for mark in await read_all(store, "resting", limit)] == ids


async def test_a_page_that_reads_no_more_records_continues_at_the_first_one_left_out(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inspection, "_RECORDS_PER_PAGE", 3)
    mesh = await Mesh.start(store, groups=6)
    ids = await mesh.lease_ids(12)
    await store.trajectories.release(mesh.session, [i for i in ids if i != "e0-4.1"], ReleaseReason.DRAINED)
    assert [mark.trajectory_id for mark in await read_all(store, "leased", 5)] == ["e0-4.1"]
    assert [mark.trajectory_id for mark in await read_all(store, None, 5)] == ids


async def test_the_newest_version_follows_the_tokens_and_leaves_with_them(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.append("e0-0.0", 0, 4)
    await mesh.append("e0-0.0", 4, 4, 1)
    (before,) = await store.inspection.marks(["e0-0.0"])
    await store.trajectories.restart(mesh.session, ["e0-0.0"])
    (after,) = await store.inspection.marks(["e0-0.0"])
    assert [(m.newest_version, m.token_count) for m in (before, after)] == [(1, 8), (None, 0)]


@pytest.mark.parametrize("wrong", ["e0-5.2", "e9-0.0", "nonsense", "e0-5.x", "", ".", "e0-5.-1"])
async def test_what_is_not_in_the_queue_is_not_found(store: TrajectoryStore, wrong: str) -> None:
    await populated(store)
    assert await store.inspection.inspect(wrong) is None


@pytest.mark.parametrize("wrong", ["x", "open", "open:1", "ready:-1:0", "open:1:x", "partial:1:0", f"open:{10**30}:0"])
async def test_a_cursor_of_nowhere_is_refused(store: TrajectoryStore, wrong: str) -> None:
    await Mesh.start(store)
    with pytest.raises(DataError, match="cursor"):
        await store.inspection.trajectory_page(None, wrong, 10)


async def test_held_trajectories_are_scanned_part_by_part(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=400, groups=200)
    for _ in range(7):
        await store.trajectories.lease(mesh.session, 64)
    cursors = {mesh.session: 0}
    seen: set[str] = set()
    for _ in range(100):
        ids, cursors = await store.inspection.scan_held(cursors, 50)
        assert len(ids) < 200, "a part is bounded"
        seen |= set(ids)
        if not cursors[mesh.session]:
            break
    assert len(seen) == 400


async def test_a_save_says_which_generator_wrote_it_and_a_name_of_two_words_breaks_nothing(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    items = [
        Append(trajectory_id=i, token_offset=0, segments=[segment(3)], generator=name)
        for i, name in (("e0-0.0", "0f3a"), ("e0-0.1", "two words"))
    ]
    assert all(result.status.ok for result in await store.trajectories.append(mesh.session, items))
    assert [mark and mark.generator for mark in await store.inspection.marks(["e0-0.0", "e0-0.1"])] == [
        "0f3a",
        "two words",
    ]
    await mesh.append("e0-0.0", 3, 2)
    (mark,) = await store.inspection.marks(["e0-0.0"])
    assert (mark.generator, mark.token_count) == ("0f3a", 5), "a save that does not say changes nothing"


async def sentences(store: TrajectoryStore, trajectory_id: str) -> list[str]:
    inspected = await store.inspection.inspect(trajectory_id)
    return list(inspected.history.sentences())


async def test_a_trajectory_tells_how_often_its_group_and_its_worker_restarted_it(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0)
    await train_one_step(mesh)
    await mesh.admit(1)
    assert await sentences(store, "e0-2.0") == []
    for _ in range(2):
        await store.trajectories.lease(mesh.session, 2)
        await mesh.append("e0-2.0", 0, 3)
        await store.restarted.restart(mesh.leader, ["e0-2"])
    again = ["restarted 2 times with its group, which exceeded the staleness bound"]
    assert await sentences(store, "e0-2.0") == again
    await store.trajectories.lease(mesh.session, 2)
    await mesh.append("e0-2.1", 0, 3)
    await store.trajectories.restart(mesh.session, ["e0-2.1"])
    assert await sentences(store, "e0-2.1") == [*again, "restarted once by its worker"]
    await mesh.append("e0-2.1", 0, 3)
    await store.restarted.set_aside(mesh.leader, ["e0-2"])
    aside = "set aside once with its group, which exceeded the staleness bound"
    assert await sentences(store, "e0-2.1") == [*again, f"{aside}: it waits for a long round"]
    await store.restarted.recall(mesh.leader, 2, 1)
    assert await sentences(store, "e0-2.1") == [*again, aside]


async def test_a_rest_and_a_cut_off_are_told_and_a_cut_off_trajectory_has_no_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(1, spare=1)
    first, second, third = await store.trajectories.lease(mesh.session, 3)
    spare = third.trajectory.trajectory_id
    await mesh.append(spare, 0, 4, version=1)
    await store.trajectories.release(mesh.session, [spare], ReleaseReason.RESTED)
    resting = "resting since train step 1: it continues under a newer policy, or when nothing else can run"
    assert await sentences(store, spare) == [resting]
    assert (await store.mesh.counts()).oldest_rest_step == 1
    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    surplus = "surplus: cut off unfinished, because enough other members of its group were scored"
    assert await sentences(store, spare) == [surplus]
    found = await store.inspection.inspect(spare)
    assert (found.mark.token_count, found.trajectory.response_token_count) == (4, 0)
    assert (await store.mesh.counts()).oldest_rest_step is None


async def test_the_newest_drop_of_a_group_is_found_on_any_page_of_the_ledger(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=5)
    for index, reason in enumerate(["stale", "straggler_timeout", "stale", "run_complete"]):
        await store.leadership.evict(mesh.leader, [f"e0-{index}"], reason)
    drops = [await store.ledger.newest_drop(f"e0-{index}", page=2) for index in range(5)]
    assert [drop.reason if drop else None for drop in drops] == [
        "stale",
        "straggler_timeout",
        "stale",
        "run_complete",
        None,
    ]


CHUNK = 3000


async def output_bytes(store: TrajectoryStore) -> int:
    info = await store.connection.command("INFO", "stats")
    return int(info["total_net_output_bytes"])


async def test_a_stage_end_reads_only_the_tokens_that_came_since_the_last_one(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2)
    names = await mesh.lease_ids(4)
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
    mesh = await Mesh.start(store, groups=1, leased=1)
    await mesh.append("e0-0.0", 0, 8)
    await mesh.append("e0-0.0", 8, 4)
    seen = await store.unclaimed.read({})
    await store.trajectories.restart(mesh.session, ["e0-0.0"])
    assert await store.unclaimed.read(seen) == {}
    begun = await known(store, "e0-0.0", 0)
    other = Append(segments=[segment(8, start=77)], **begun)
    await store.trajectories.append(mesh.session, [other])
    await mesh.append("e0-0.0", 8, 4)
    now = await store.unclaimed.read(seen)
    assert now["e0-0.0"].trajectory.response_token_count == seen["e0-0.0"].trajectory.response_token_count
    expected = np.concatenate([other.segments[0].token_ids, segment(4, 0, 8).token_ids])
    assert np.array_equal(now["e0-0.0"].trajectory.response_ids, expected)


async def test_linked_chunks_are_read_once_too(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    large = INLINE_LIMIT_BYTES // 4
    await mesh.append("e0-0.0", 0, large)
    seen = await store.unclaimed.read({})
    await mesh.append("e0-0.0", large, 6)
    before = await output_bytes(store)
    now = await store.unclaimed.read(seen)
    assert await output_bytes(store) - before < 10_000
    assert now["e0-0.0"].trajectory.response_token_count == large + 6


async def test_a_group_that_leaves_the_queue_is_not_unclaimed_any_more(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2, completed=True)
    seen = await store.unclaimed.read({})
    assert len(seen) == 4
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    now = await store.unclaimed.read(seen)
    assert list(now) == ["e0-1.0", "e0-1.1"] and all(now[i] is seen[i] for i in now)
