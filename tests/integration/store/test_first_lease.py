"""Time of a trajectory's first lease: the beginning of its trace, in any worker."""

from __future__ import annotations

import asyncio
import time

from rollmesh.store import ReleaseReason, TrajectoryStore, WriteStatus

from .store_mesh import Mesh


async def test_the_time_of_the_first_lease_stays_with_the_trajectory(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    before = time.time()
    first = {t.trajectory.trajectory_id: t.first_lease_time for t in await store.trajectories.lease(mesh.session, 2)}
    assert len(first) == 2
    assert all(before - 1.0 <= since <= time.time() + 1.0 for since in first.values())
    assert await mesh.append("e0-0.0", 0, 4) == WriteStatus.SAVED
    await store.trajectories.release(mesh.session, list(first), ReleaseReason.DRAINED)
    while time.time() <= max(first.values()) + 0.002:  # the server's clock has moved on by then
        await asyncio.sleep(0)
    again = {t.trajectory.trajectory_id: t.first_lease_time for t in await store.trajectories.lease(mesh.session, 2)}
    assert again == first


async def test_a_finished_trajectory_whose_worker_died_still_knows_its_first_lease(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1)
    first = await store.trajectories.lease(mesh.session, 1)
    await mesh.finish(first[0].trajectory.trajectory_id, 0, 4)
    await store.sessions.close(mesh.session)
    heir = await store.sessions.open("heir")
    (orphan,) = await store.trajectories.lease_scoring(heir, 1)
    assert orphan.trajectory.trajectory_id == first[0].trajectory.trajectory_id
    assert orphan.first_lease_time == first[0].first_lease_time
