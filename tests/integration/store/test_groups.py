"""Groups on a real server: their rounds, spare members, forks, and the ledger of their drops."""

from dataclasses import replace

import pytest

from rollmesh.errors import Conflict, DataError, SessionLost
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import Cursor, Desired
from rollmesh.store import Finish, LeasedTrajectory, ReleaseReason, Score, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason, ForkStatus

from .store_mesh import UNSCORABLE, Mesh, group, held, scored, segment
from .stored_keys import read_truth


async def test_a_reward_that_is_not_a_number_is_an_error_of_the_caller(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    with pytest.raises(DataError, match="not a finite number"):
        await mesh.score("e0-0.0", float("nan"))


async def test_items_may_come_in_any_number(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=1000, group_size=4)
    await mesh.admit(150, needed=4)
    leased = []
    while part := await store.trajectories.lease(mesh.session, 1000):
        leased += part
    ids = [t.trajectory.trajectory_id for t in leased]
    assert len(ids) == len(set(ids)) == 600
    finishes = [
        Finish(trajectory_id=i, token_offset=0, segments=[segment(2)], finish_reason=FinishReason.LENGTH) for i in ids
    ]
    assert {r.status for r in await store.trajectories.finish(mesh.session, finishes)} == {WriteStatus.SAVED}
    scores = [Score(trajectory_id=i, outcome=UNSCORABLE, shaped_reward=0.0) for i in ids[:4]] + [
        Score(trajectory_id=i, outcome=scored(1.0), shaped_reward=1.0) for i in ids[4:]
    ]
    assert {r.status for r in await store.trajectories.score(mesh.session, scores)} == {WriteStatus.SAVED}
    view = await store.mesh.view()
    assert (view.ready_groups, view.open_groups, view.pending) == (149, 1, 4)
    assert [g.admission_index for g in view.ready[:4]] == [2, 3, 4, 5]
    assert await store.leadership.evict(mesh.leader, await store.mesh.live_groups(), "stale") == 150


async def test_the_ledger_says_how_many_drops_it_no_longer_names(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    assert await store.ledger.forgotten_drops() == 0
    await mesh.admit(3)
    await store.leadership.evict(mesh.leader, ["e0-0", "e0-1", "e0-2"], "stale")
    assert await store.ledger.forgotten_drops() == 0
    await store.connection.command("XTRIM", store.connection.keys.single("ledger"), "MAXLEN", 1)
    assert (await store.ledger.forgotten_drops(), await store.ledger.dropped_groups()) == (2, {"e0-2": "stale"})


async def train(mesh: Mesh) -> None:
    """Train batch 1, which has the group e0-0."""
    await mesh.train(1, ["e0-0"])


@pytest.mark.parametrize("returned", ["released", "registered again"])
async def test_a_member_that_has_returned_to_the_queue_is_given_again_to_the_same_request(
    store: TrajectoryStore, returned: str
) -> None:
    mesh = await Mesh.start(store, groups=1)
    (first, _) = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    child = fork.leased.trajectory.trajectory_id
    if returned == "released":
        await store.trajectories.release(mesh.session, [child], ReleaseReason.DRAINED)
    else:
        await store.sessions.reregister(mesh.session, [held("e0-0.0"), held("e0-0.1")], "worker")
    assert (await store.mesh.view()).pending == 1
    again = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert again.leased.trajectory.trajectory_id == child
    assert ((await store.mesh.view()).pending, (await store.mesh.view()).leased) == (0, 3)
    assert (await store.mesh.counts()).totals["forks_total"] == 1


async def test_a_member_that_another_worker_has_leased_meanwhile_is_not_given_again(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    (first, _) = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    await store.trajectories.release(mesh.session, [fork.leased.trajectory.trajectory_id], ReleaseReason.FAILED)
    assert len(await store.trajectories.lease(await store.sessions.open("another"), 4)) == 1
    again = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert again.leased.trajectory.trajectory_id != fork.leased.trajectory.trajectory_id


async def test_a_fork_is_refused_where_nothing_may_be_leased(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=3, groups=2)
    leased = await store.trajectories.lease(mesh.session, 3)
    name = leased[0].trajectory.trajectory_id
    assert (await store.trajectories.fork(mesh.session, name, "a")).status is ForkStatus.POOL_FULL
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=3, paused=True))
    assert (await store.trajectories.fork(mesh.session, name, "a")).status is ForkStatus.PAUSED
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=64))
    stranger = await store.sessions.open("stranger")
    assert (await store.trajectories.fork(stranger, name, "a")).status is ForkStatus.LOST
    for nonce in "ab":
        assert (await store.trajectories.fork(mesh.session, name, nonce)).status is ForkStatus.FORKED
    assert (await store.trajectories.fork(mesh.session, name, "c")).status is ForkStatus.GROUP_FULL
    await store.sessions.close(mesh.session)
    with pytest.raises(SessionLost):
        await store.trajectories.fork(mesh.session, name, "d")


async def test_a_lease_can_leave_new_work_alone(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2)
    (first,) = await store.trajectories.lease(mesh.session, 1)
    assert await mesh.append(first.trajectory.trajectory_id, 0, 4) == 1
    await store.trajectories.release(mesh.session, [first.trajectory.trajectory_id], ReleaseReason.DRAINED)
    assert await mesh.lease_ids(8, 0) == ["e0-0.0"]
    assert await store.trajectories.lease(mesh.session, 8, 0) == []
    assert await mesh.lease_ids(8, 1) == ["e0-0.1"]


async def begin(store: TrajectoryStore, **changes: object) -> Mesh:
    return await Mesh.start(
        store, **{"has_rounds": True, "keeps_history": True, "most_members": 12, "max_staleness": 0, **changes}
    )


async def admit(mesh: Mesh) -> str:
    """Open a group with rounds at the cursor."""
    before = await mesh.store.leadership.cursor()
    new = replace(group(before.index), plan="{}")
    after = Cursor(index=before.index + 1)
    assert await mesh.store.leadership.admit(mesh.leader, [new], before, after) == 1
    return new.group_id


async def lease(mesh: Mesh, count: int = 64) -> list[LeasedTrajectory]:
    return await mesh.store.trajectories.lease(mesh.session, count)


async def complete(mesh: Mesh, *values: float | None) -> None:
    for leased, value in zip(await lease(mesh, len(values)), values, strict=True):
        await mesh.complete(leased, value)


async def undecided(mesh: Mesh) -> GroupOutcome:
    (found,) = await mesh.store.rounds.undecided()
    return found


async def test_a_group_of_a_batch_file_whose_round_ends_late_is_not_left_for_a_decision(store: TrajectoryStore) -> None:
    """The last score comes between the two scripts that apply a batch file."""
    mesh = await begin(store)
    group_id = await admit(mesh)
    first, last = await lease(mesh)
    await mesh.complete(first, 1.0)
    assert await mesh.finish(last.trajectory.trajectory_id, 0, 5) == WriteStatus.SAVED
    await store.connection.run("reassert_groups", mesh.trainer, 1, "digest", 1, group_id)
    assert await mesh.score(last.trajectory.trajectory_id, 0.0) == WriteStatus.SAVED
    assert (await store.mesh.view()).undecided_groups == 1
    await store.connection.run("forget_groups", mesh.trainer, group_id)
    assert (await store.mesh.view()).undecided_groups == 0


async def test_only_the_leader_decides_and_not_beyond_the_most_members(store: TrajectoryStore) -> None:
    mesh = await begin(store, most_members=3)
    await admit(mesh)
    await complete(mesh, 1.0, 0.0)
    found = await undecided(mesh)
    assert (found.prompt_id, [m.outcome for m in found.members]) == ("0", [1, 0])
    with pytest.raises(Conflict, match="2 more exceed the limit of 3"):
        await store.rounds.extend(mesh.leader, found, 4, 2, "{}")
    with pytest.raises(SessionLost):
        await store.rounds.extend("another", found, 3, 1, "{}")
    with pytest.raises(SessionLost):
        await store.rounds.close("another", found)
    with pytest.raises(Conflict, match="2 scored members, not 1"):
        await store.connection.run("close_group", mesh.leader, found.group_id, 0, 0, "1.0", "")
    assert (await store.mesh.view()).undecided_groups == 1
    assert await store.rounds.extend(mesh.leader, found, 3, 1, "{}")


async def test_a_replayed_dead_letter_is_shaped_like_every_group(store: TrajectoryStore) -> None:
    mesh = await begin(store)
    await admit(mesh)
    first, _ = await lease(mesh)
    await store.trajectories.fail(mesh.session, [(first.trajectory.trajectory_id, "broke")])
    replay = await store.dead_letters.replay(first.trajectory.trajectory_id)
    assert await store.leadership.admit_replays(mesh.leader, 1) == 1
    for leased in await lease(mesh):
        if leased.trajectory.group_id == replay:
            assert leased.plan == {}
            await mesh.complete(leased, float(leased.trajectory.member_index))
    assert (await undecided(mesh)).group_id == replay


async def test_equal_rewards_are_filtered_refunded_and_counted_in_a_row(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, filter_zero_variance=True, groups=4)
    values = [1.0, 1.0, 0.0, -0.0, 0.0, 1.0, 0.5, 0.5]
    for leased, value in zip(await store.trajectories.lease(mesh.session, 8), values, strict=True):
        await mesh.complete(leased, value)
    view = await store.mesh.view()
    assert (view.admitted_unconsumed, view.filtered_in_a_row) == (1, 1)
    assert [g.group_id for g in view.ready] == ["e0-2"]
    assert (await store.mesh.counts()).drops == {"filtered_all_right": 2, "filtered_all_wrong": 1}
    assert await store.ledger.dropped_groups() == {
        "e0-0": "filtered_all_right",
        "e0-1": "filtered_all_wrong",
        "e0-3": "filtered_all_right",
    }
    assert await store.mesh.live_groups() == ["e0-2"]


async def test_the_ledger_names_the_decile_of_a_dropped_length(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=12)
    leased = await store.trajectories.lease(mesh.session, 24)
    for at, item in enumerate(leased[:20]):
        await mesh.finish(item.trajectory.trajectory_id, 0, 2 ** (1 + at // 2))
    await mesh.append("e0-10.0", 0, 2000)
    await mesh.append("e0-11.0", 0, 1)
    assert await store.leadership.evict(mesh.leader, ["e0-10", "e0-11", "e0-10", "unknown"], "stale") == 2
    assert await mesh.append("e0-11.0", 1, 2) == WriteStatus.LOST
    assert [d.length_decile for d in await store.ledger.drops()] == [9, 0]


async def test_the_shortest_groups_are_listed_although_many_were_admitted_before_them(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups_per_batch=1, groups=6, leased=12)
    for index in range(6):
        for member in range(2):
            trajectory_id = f"e0-{index}.{member}"
            assert await mesh.finish(trajectory_id, 0, 20 - index) == 1
            assert await mesh.score(trajectory_id, float(member)) == 1
    admitted = [g.group_id for g in (await store.mesh.view()).ready]
    assert admitted == ["e0-0", "e0-1"], "a list has two batches"
    shortest = [(g.group_id, g.token_count) for g in (await store.mesh.view(shortest=True)).ready]
    assert set(shortest) == {("e0-0", 40), ("e0-1", 38), ("e0-4", 32), ("e0-5", 30)}


async def test_a_fork_is_leased_at_once_and_its_group_waits_for_it(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1)
    first, second = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert fork.status is ForkStatus.FORKED and fork.leased is not None
    child = fork.leased
    assert child.trajectory.trajectory_id == "e0-0.2"
    assert child.trajectory.prompt.token_ids.tolist() == first.trajectory.prompt.token_ids.tolist()
    assert (child.attempt, child.trajectory.segments) == (1, ())
    assert (await store.mesh.view()).leased == 3
    assert (await read_truth(store)).problems == []

    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    assert (await store.mesh.view()).ready_groups == 0
    await mesh.complete(child, 1.0)
    view = await store.mesh.view()
    assert view.ready_groups == 1
    await store.leadership.cut(mesh.leader, 1, [group.group_id for group in view.ready])
    batch = await mesh.claim(1)
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["e0-0.0", "e0-0.1", "e0-0.2"]


async def test_a_member_with_forks_that_gets_no_score_has_one_replacement(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1, needed=4)
    first, *others = await store.trajectories.lease(mesh.session, 4)
    forks = [await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, nonce) for nonce in "ab"]
    for each in (first, *(fork.leased for fork in forks if fork.leased)):
        await mesh.complete(each, None)
    counts = (await store.mesh.counts()).totals
    assert (counts["unscorable_total"], counts["replacements_total"]) == (3, 1)
    assert (await read_truth(store)).problems == []
    (replacement,) = await store.trajectories.lease(mesh.session, 8)
    for value, each in enumerate((*others, replacement)):
        await mesh.complete(each, float(value))
    (ready,) = (await store.mesh.view()).ready
    await store.leadership.cut(mesh.leader, 1, [ready.group_id])
    batch = await mesh.claim(1)
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["e0-0.1", "e0-0.2", "e0-0.3", "e0-0.6"]
