"""Members beyond the needed ones: spare ones, which are cut off as surplus, and forks, which the group waits for."""

from __future__ import annotations

import pytest

from rollmesh.errors import SessionLost
from rollmesh.mesh import Desired
from rollmesh.store import ReleaseReason, TrajectoryStore
from rollmesh.types import ForkStatus

from .store_mesh import Mesh, held


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
