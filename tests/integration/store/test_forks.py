"""One more member for the group of a held trajectory: bounded, idempotent, and like any other from then on."""

from __future__ import annotations

import random

import pytest

from rollmesh.errors import SessionLost
from rollmesh.mesh import Desired
from rollmesh.store import ReleaseReason, TrajectoryStore
from rollmesh.types import ForkStatus

from .store_mesh import Mesh, held
from .stored_keys import read_truth


async def test_a_fork_is_leased_at_once_and_its_group_waits_for_it(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    first, second = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert fork.status is ForkStatus.FORKED and fork.leased is not None
    child = fork.leased
    assert child.trajectory.trajectory_id == "e0-0.2"
    assert child.trajectory.prompt.token_ids.tolist() == first.trajectory.prompt.token_ids.tolist()
    assert (child.attempt, child.lease_new, child.trajectory.segments) == (1, True, ())
    assert (await store.mesh.view()).leased == 3
    assert (await read_truth(store)).problems == []

    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    assert (await store.mesh.view()).ready_groups == 0
    await mesh.complete(child, 1.0)
    view = await store.mesh.view()
    assert view.ready_groups == 1
    await store.leadership.cut(mesh.leader, 1, [group.group_id for group in view.ready])
    batch = await store.training.claim(mesh.trainer, 1, 5)
    assert batch is not None
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["e0-0.0", "e0-0.1", "e0-0.2"]
    assert (await read_truth(store)).problems == []


async def test_a_retried_fork_gets_the_same_member_and_another_one_a_new_one(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    (first, _) = await store.trajectories.lease(mesh.session, 2)
    name = first.trajectory.trajectory_id
    once, twice = [await store.trajectories.fork(mesh.session, name, "a") for _ in range(2)]
    assert once.leased is not None and twice.leased is not None
    assert once.leased.trajectory.trajectory_id == twice.leased.trajectory.trajectory_id
    assert once.leased.first_lease_time == twice.leased.first_lease_time
    other = await store.trajectories.fork(mesh.session, name, "b")
    assert other.leased is not None
    assert other.leased.trajectory.trajectory_id == "e0-0.3"
    assert (await store.mesh.counts()).totals["forks_total"] == 2


@pytest.mark.parametrize("returned", ["released", "registered again"])
async def test_a_member_that_has_returned_to_the_queue_is_given_again_to_the_same_request(
    store: TrajectoryStore, returned: str
) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    (first, _) = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert fork.leased is not None
    child = fork.leased.trajectory.trajectory_id
    if returned == "released":
        await store.trajectories.release(mesh.session, [child], ReleaseReason.DRAINED)
    else:
        await store.sessions.reregister(mesh.session, [held("e0-0.0"), held("e0-0.1")], "worker")
    assert (await store.mesh.view()).pending == 1
    again = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert again.leased is not None
    assert again.leased.trajectory.trajectory_id == child
    assert ((await store.mesh.view()).pending, (await store.mesh.view()).leased) == (0, 3)
    assert (await store.mesh.counts()).totals["forks_total"] == 1
    assert (await read_truth(store)).problems == []


async def test_a_member_that_another_worker_has_leased_meanwhile_is_not_given_again(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    (first, _) = await store.trajectories.lease(mesh.session, 2)
    fork = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert fork.leased is not None
    await store.trajectories.release(mesh.session, [fork.leased.trajectory.trajectory_id], ReleaseReason.FAILED)
    assert len(await store.trajectories.lease(await store.sessions.open("another"), 4)) == 1
    again = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    assert again.leased is not None
    assert again.leased.trajectory.trajectory_id != fork.leased.trajectory.trajectory_id
    assert (await read_truth(store)).problems == []


async def test_a_fork_is_refused_where_nothing_may_be_leased(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, pool_size=3)
    await mesh.admit(2)
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
    assert (await read_truth(store)).problems == []


async def test_a_lease_can_leave_new_work_alone(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    (first,) = await store.trajectories.lease(mesh.session, 1)
    assert await mesh.append(first.trajectory.trajectory_id, 0, 4) == 1
    await store.trajectories.release(mesh.session, [first.trajectory.trajectory_id], ReleaseReason.DRAINED)
    assert [i.trajectory.trajectory_id for i in await store.trajectories.lease(mesh.session, 8, 0)] == ["e0-0.0"]
    assert await store.trajectories.lease(mesh.session, 8, 0) == []
    assert [i.trajectory.trajectory_id for i in await store.trajectories.lease(mesh.session, 8, 1)] == ["e0-0.1"]


@pytest.mark.parametrize("seed", range(4))
async def test_forks_keep_every_promise_of_the_queue_whatever_else_happens(store: TrajectoryStore, seed: int) -> None:
    rng = random.Random(seed)
    mesh = await Mesh.start(store, pool_size=7)
    await mesh.admit(4, needed=3)
    held: dict[str, int] = {}
    for step in range(120):
        for item in await store.trajectories.lease(mesh.session, rng.randrange(3)):
            held[item.trajectory.trajectory_id] = item.trajectory.response_token_count
        name = rng.choice(sorted(held)) if held else ""
        match rng.randrange(6 if held else 1):
            case 1 | 2:
                if await mesh.append(name, held[name], 2) == 1:
                    held[name] += 2
            case 3:
                fork = await store.trajectories.fork(mesh.session, name, str(step))
                if fork.leased is not None:
                    held[fork.leased.trajectory.trajectory_id] = 0
            case 4:
                if await mesh.finish(name, held[name], 1) == 1:
                    await mesh.score(name, float(rng.randrange(2)))
                del held[name]
            case 5:
                await store.trajectories.release(mesh.session, [name], rng.choice(list(ReleaseReason)))
                del held[name]
        view = await store.mesh.view()
        assert view.leased <= 7
        assert (await read_truth(store)).problems == []
    await store.sessions.close(mesh.session)
    mesh.session = await store.sessions.open("another")
    await store.leadership.set_desired(mesh.leader, Desired(pool_size=7, rest_before_step=1))  # nothing else can run
    await mesh.complete_all()
    assert (await read_truth(store)).problems == []
    assert (await store.mesh.view()).open_groups == 0
