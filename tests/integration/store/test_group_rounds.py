"""Groups with rounds: the leader extends or closes a group whose round has ended, once."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.group_outcome import GroupOutcome
from rollmesh.mesh import Cursor
from rollmesh.store import LeasedTrajectory, TrajectoryStore, WriteStatus

from .store_mesh import Mesh, group


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
