"""First tokens that are reported before anything is saved: from then on the group is as old as they are."""

from __future__ import annotations

import pytest

from rollmesh.errors import Conflict
from rollmesh.store import FirstToken, TrajectoryStore, WriteStatus
from rollmesh.store.queue_types import ReleaseReason

from .store_mesh import Mesh, policy


async def begin(mesh: Mesh, version: int, *trajectory_ids: str, session: str | None = None) -> list[WriteStatus]:
    items = [FirstToken(trajectory_id=i, policy_version=version) for i in trajectory_ids]
    return [
        result.status for result in await mesh.store.trajectories.report_first_tokens(session or mesh.session, items)
    ]


async def age(mesh: Mesh) -> dict[str, int | None]:
    """Smallest train step of every open group."""
    return {g.group_id: g.min_train_step for g in (await mesh.store.mesh.view()).stalest_open}


async def two_versions(store: TrajectoryStore, groups: int = 1, needed: int = 2) -> Mesh:
    mesh = await Mesh.start(store, pool_size=1 << 14, group_size=needed)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(groups, needed)
    return mesh


async def test_a_group_is_as_old_as_its_first_token_although_nothing_is_saved(store: TrajectoryStore) -> None:
    mesh = await two_versions(store)
    await store.trajectories.lease(mesh.session, 2)
    assert await age(mesh) == {"e0-0": None}
    assert await begin(mesh, 1, "e0-0.0") == [WriteStatus.SAVED]
    assert await age(mesh) == {"e0-0": 1}
    assert await begin(mesh, 0, "e0-0.1") == [WriteStatus.SAVED]
    assert await begin(mesh, 1, "e0-0.1") == [WriteStatus.SAVED]
    assert await age(mesh) == {"e0-0": 0}
    assert (await store.mesh.view()).unclaimed_by_step == ((0, 1),)
    for trajectory_id, version in (("e0-0.0", 1), ("e0-0.1", 0)):
        assert await mesh.finish(trajectory_id, 0, 5, version) == 1
        assert await mesh.score(trajectory_id, 1.0) == 1
    assert [g.min_train_step for g in (await store.mesh.view()).ready] == [0]


@pytest.mark.parametrize("by", ["release", "close_session"])
async def test_a_group_gets_younger_when_a_first_token_goes_back_unsaved(store: TrajectoryStore, by: str) -> None:
    mesh = await two_versions(store)
    await store.trajectories.lease(mesh.session, 2)
    await begin(mesh, 0, "e0-0.0")
    await mesh.append("e0-0.1", 0, 3, version=1)
    assert await age(mesh) == {"e0-0": 0}
    if by == "release":
        assert await store.trajectories.release(mesh.session, ["e0-0.0"], ReleaseReason.FAILED) == 1
    else:
        await store.sessions.close(mesh.session)
    assert await age(mesh) == {"e0-0": 1}
    session = await store.sessions.open("another")
    assert len(await store.trajectories.lease(session, 2)) == (1 if by == "release" else 2)
    assert await begin(mesh, 1, "e0-0.0", session=session) == [WriteStatus.SAVED]
    assert await age(mesh) == {"e0-0": 1}


async def test_a_first_token_is_reported_by_the_holder_and_of_an_announced_version_only(
    store: TrajectoryStore,
) -> None:
    mesh = await two_versions(store)
    await store.trajectories.lease(mesh.session, 1)
    another = await store.sessions.open("another")
    assert await begin(mesh, 0, "e0-0.0", session=another) == [WriteStatus.LOST]
    assert await begin(mesh, 0, "e0-0.1", "e9-9.0") == [WriteStatus.LOST] * 2
    with pytest.raises(Conflict, match="policy version 7 has not been announced"):
        await begin(mesh, 7, "e0-0.0")
    assert await age(mesh) == {"e0-0": None}


@pytest.mark.parametrize("by", ["release", "close_session"])
async def test_many_unsaved_first_tokens_go_back_in_bounded_calls(store: TrajectoryStore, by: str) -> None:
    """Each reads every member of its group: a call ends after so many, and the next one continues."""
    mesh = await two_versions(store, groups=24, needed=64)
    ids: list[str] = []
    while leased := await store.trajectories.lease(mesh.session, 64):
        ids += [item.trajectory.trajectory_id for item in leased]
    first = [f"e0-{index}.0" for index in range(24)]
    await begin(mesh, 0, *first)
    assert set((await age(mesh)).values()) <= {0, None}
    if by == "release":
        assert await store.trajectories.release(mesh.session, first) == 24
        assert (await store.mesh.view()).pending == 24
    else:
        await store.sessions.close(mesh.session)
        assert (await store.mesh.view()).pending == len(ids) == 24 * 64
    seen = await store.mesh.view()
    assert seen.unclaimed_by_step == ()
    assert seen.leased + seen.pending == 24 * 64
