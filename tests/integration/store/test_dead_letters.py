"""Trajectories that gave up, on a real server: when, what their letters keep, how they are replayed."""

import pytest

from rollmesh.errors import Conflict
from rollmesh.launcher.run_up import queue_account
from rollmesh.mesh import Cursor
from rollmesh.report.ledger_check import lost_groups
from rollmesh.store import ReleaseReason, TrajectoryStore, WriteStatus

from .store_mesh import Mesh, put_back
from .stored_keys import read_truth


async def test_leases_without_progress_end_as_a_dead_letter_that_can_be_replayed(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=2, groups=1)
    for attempt in (1, 2):
        leased = (await store.trajectories.lease(mesh.session, 1))[0]
        assert (leased.trajectory.trajectory_id, leased.attempt) == ("e0-0.0", attempt)
        if attempt == 1:
            await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.PAUSED)
            leased = (await store.trajectories.lease(mesh.session, 1))[0]
            assert leased.attempt == 1, "a pause is no attempt"
        await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)
    assert await mesh.lease_ids(2) == ["e0-0.1", "e0-0.2"]
    letters = await store.dead_letters.newest()
    assert [(letter.trajectory_id, letter.reason) for letter in letters] == [("e0-0.0", "max_attempts")]
    inspected = (await store.dead_letters.get("e0-0.0")).trajectory
    assert inspected.prompt.prompt_id == "0"
    new = await store.dead_letters.replay("e0-0.0")
    assert new == "e0-0r1"
    assert await store.dead_letters.replay("e0-0.0") == new
    assert (await store.mesh.view()).open_groups == 1, "the leader has to raise the oldest version to start on first"
    assert await store.leadership.admit_replays(mesh.leader, 8) == 1
    assert (await store.mesh.view()).open_groups == 2
    assert (await store.dead_letters.newest())[0].replayed_as == new
    assert (await read_truth(store)).problems == []
    assert await store.dead_letters.delete("e0-0.0")
    with pytest.raises(Conflict):
        await store.dead_letters.get("e0-0.0")


async def test_the_audit_misses_a_replayed_dead_letter_whose_group_vanished(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=1)
    assert await store.trajectories.fail(mesh.session, [("e0-0.0", "made")]) == 1
    new = await store.dead_letters.replay("e0-0.0")
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    account = await queue_account(store)
    assert account.replays == (new,) and lost_groups(account, ()) == ()
    keys = store.connection.keys
    await store.connection.command("ZREM", keys.single("open"), new)
    await store.connection.command("DEL", keys.of("group", new))
    assert lost_groups(await queue_account(store), ()) == (new,)
    await put_back(store, {})  # a queue that contradicts itself


async def test_one_call_buries_some_and_takes_what_can_still_be_scored(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=1, groups=4)
    ids = await mesh.lease_ids(8)
    for trajectory_id in ids[:5]:
        await mesh.finish(trajectory_id, 0, 3)
    await store.trajectories.release(mesh.session, ids[:5], ReleaseReason.FAILED)
    assert len(await store.trajectories.lease_scoring(mesh.session, 5)) == 5
    await mesh.finish(ids[5], 0, 3)
    await store.trajectories.release(mesh.session, ids[:6], ReleaseReason.FAILED)
    assert await store.trajectories.lease_scoring(mesh.session, 6) == [], "four burials a call"
    assert [t.trajectory.trajectory_id for t in await store.trajectories.lease_scoring(mesh.session, 6)] == [ids[5]]
    assert {letter.trajectory_id for letter in await store.dead_letters.newest()} == set(ids[:5])


async def test_a_letter_keeps_its_tokens_until_a_thousand_newer_ones_need_its_room(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    await mesh.append("e0-0.0", 0, 4)
    assert await store.trajectories.fail(mesh.session, [("e0-0.0", "the oldest")]) == 1
    letter = await store.dead_letters.get("e0-0.0")
    assert letter.trajectory.response_token_count == letter.token_count == 4
    assert await mesh.append("e0-0.0", 4, 2) == WriteStatus.LOST
    assert (await store.mesh.view()).pending == 1, "a replacement waits"
    keys, command = store.connection.keys, store.connection.command
    newer = [word for number in range(999) for word in (2e15 + number, f"e9-{number}.0")]
    await command("ZADD", keys.single("letters"), *newer)
    await store.trajectories.fail(mesh.session, [("e0-0.1", "one too many")])
    counts = await store.mesh.counts()
    assert (counts.dead_letters, counts.totals["letters_forgotten_total"], counts.totals["dead_total"]) == (1000, 1, 2)
    with pytest.raises(Conflict):
        await store.dead_letters.get("e0-0.0")
    for kind in ("letter", "letter_segments", "letter_prompt"):
        assert not await command("EXISTS", keys.of(kind, "e0-0.0"))
    await command("ZADD", keys.single("letters"), 3e15, "e0-0.1")
    assert [letter.reason for letter in await store.dead_letters.newest(1)] == ["one too many"]


async def test_no_two_replays_have_one_name_even_when_the_first_is_long_trained(store: TrajectoryStore) -> None:
    """The audit knows groups by name: batch files remember a name for ever, tombstones for some steps."""
    mesh = await Mesh.start(store, max_staleness=1000, groups=1, leased=2)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke"), ("e0-0.1", "broke")])
    first = await store.dead_letters.replay("e0-0.0")
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    await mesh.complete_all()
    await mesh.admit(2)
    await mesh.complete_all()
    for step, group_id in enumerate((first, "e0-1", "e0-2"), start=1):
        await mesh.train(step, [group_id], tombstone_steps=1)
    assert first not in (await read_truth(store)).tombstones
    second = await store.dead_letters.replay("e0-0.1")
    assert (first, second) == ("e0-0r1", "e0-0r2")


async def test_a_redis_that_lost_everything_learns_the_names_of_replays_from_batch_files(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    await store.training.reassert(mesh.trainer, 1, 1, [(1, ["e0-7r4", "e0-8"])], [], Cursor())
    await store.connection.run("report_trained", mesh.trainer, 1, 1)
    await store.connection.command("DEL", store.connection.keys.single("tombstones"))
    await mesh.admit(1)
    await store.trajectories.lease(mesh.session, 1)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    assert await store.dead_letters.replay("e0-0.0") == "e0-0r5"


async def test_a_waiting_replay_is_opened_by_the_leader_without_its_letter(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups_per_batch=2, max_staleness=0, groups=2, leased=1)
    await store.trajectories.fail(mesh.session, [("e0-0.0", "broke")])
    group_id = await store.dead_letters.replay("e0-0.0")
    assert (await store.mesh.view()).admitted_unconsumed == 2
    assert await store.dead_letters.replay("e0-0.0") == group_id
    assert await store.dead_letters.delete("e0-0.0"), "the replay does not need the letter any more"
    assert group_id in await store.mesh.live_groups()
    assert await store.leadership.evict(mesh.leader, ["e0-1"], "stale") == 1
    assert await store.leadership.admit_replays(mesh.leader, 0) == 0
    assert await store.leadership.admit_replays(mesh.leader, 5) == 1
    assert await store.leadership.admit_replays(mesh.leader, 5) == 0
    view = await store.mesh.view()
    assert (view.admitted_unconsumed, view.open_groups) == (2, 2)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-0", group_id])
    batch = await mesh.claim(1)
    assert [g.group_id for g in batch.groups] == ["e0-0", group_id]


async def test_replays_sent_again_after_a_lost_reply_open_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    leased = await mesh.lease_ids(2)
    await store.trajectories.fail(mesh.session, [(trajectory_id, "broke") for trajectory_id in leased])
    first, second = [await store.dead_letters.replay(trajectory_id) for trajectory_id in leased]
    for _ in range(2):
        assert await store.connection.run("admit_replays", mesh.leader, "nonce", 1) == 1
    assert await opened(store) == ["e0-0", first]
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    assert await opened(store) == ["e0-0", first, second]


async def opened(store: TrajectoryStore) -> list[str]:
    open_groups = store.connection.keys.single("open")
    return [group_id.decode() for group_id in await store.connection.command("ZRANGE", open_groups, 0, -1)]


async def test_a_trajectory_that_begins_again_at_every_lease_ends_as_a_dead_letter(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=3, groups=1)
    for attempt, tokens in ((1, 2), (1, 3), (2, 4), (3, 5)):
        leased = (await store.trajectories.lease(mesh.session, 1))[0]
        assert (leased.trajectory.trajectory_id, leased.attempt) == ("e0-0.0", attempt)
        await store.trajectories.restart(mesh.session, ["e0-0.0"])
        await mesh.append("e0-0.0", 0, tokens)
        await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)
    assert await mesh.lease_ids(1) == ["e0-0.1"]
    letters = await store.dead_letters.newest()
    assert [(letter.trajectory_id, letter.reason) for letter in letters] == [("e0-0.0", "max_attempts")]


async def test_a_finished_trajectory_that_no_service_can_score_ends_as_a_dead_letter(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_attempts=2, groups=1, leased=2)
    await mesh.append("e0-0.1", 0, 4)
    await mesh.finish("e0-0.0", 0, 3)
    await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED)
    for attempt, reason in ((1, ReleaseReason.FAILED), (2, ReleaseReason.DRAINED), (2, ReleaseReason.FAILED)):
        assert [t.attempt for t in await store.trajectories.lease_scoring(mesh.session, 4)] == [attempt]
        await store.trajectories.release(mesh.session, ["e0-0.0"], reason)
    assert await store.trajectories.lease_scoring(mesh.session, 4) == []
    (letter,) = await store.dead_letters.newest()
    assert (letter.trajectory_id, letter.reason, letter.attempts) == ("e0-0.0", "max_attempts to score it", 2)
    assert letter.token_count == 3
    view = await store.mesh.view()
    assert (view.finished, view.pending) == (0, 1), "a replacement waits"
