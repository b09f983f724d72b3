"""Tokens of a ready group, for the order of the cut."""

from __future__ import annotations

from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh
from .stored_keys import read_truth


async def finish_group(mesh: Mesh, index: int, *lengths: int) -> None:
    for member, tokens in enumerate(lengths):
        trajectory_id = f"e0-{index}.{member}"
        assert await mesh.finish(trajectory_id, 0, tokens) == 1
        assert await mesh.score(trajectory_id, float(member)) == 1


async def test_a_ready_group_has_the_tokens_of_its_scored_members(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await store.trajectories.lease(mesh.session, 8)
    await finish_group(mesh, 0, 3, 4)
    assert await mesh.finish("e0-1.0", 0, 50) == 1
    assert await mesh.score("e0-1.0", None) == 1
    (replacement,) = await store.trajectories.lease(mesh.session, 8)
    assert replacement.trajectory.trajectory_id == "e0-1.2"
    for trajectory_id, tokens in (("e0-1.1", 6), ("e0-1.2", 1)):
        assert await mesh.finish(trajectory_id, 0, tokens) == 1
        assert await mesh.score(trajectory_id, float(tokens)) == 1
    assert [(g.group_id, g.token_count) for g in (await store.mesh.view()).ready] == [("e0-0", 7), ("e0-1", 7)]
    assert (await read_truth(store)).problems == []


async def test_the_shortest_groups_are_listed_although_many_were_admitted_before_them(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups_per_batch=1)
    await mesh.admit(6)
    await store.trajectories.lease(mesh.session, 12)
    for index in range(6):
        await finish_group(mesh, index, 20 - index, 20 - index)
    admitted = [g.group_id for g in (await store.mesh.view()).ready]
    assert admitted == ["e0-0", "e0-1"], "a list has two batches"
    shortest = [(g.group_id, g.token_count) for g in (await store.mesh.view(shortest=True)).ready]
    assert set(shortest) == {("e0-0", 40), ("e0-1", 38), ("e0-4", 32), ("e0-5", 30)}


async def test_a_reverted_cut_makes_its_groups_ready_with_their_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await store.trajectories.lease(mesh.session, 8)
    await finish_group(mesh, 0, 3, 4)
    await finish_group(mesh, 1, 8, 1)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    assert (await read_truth(store)).problems == []
    dropped, left = await store.connection.run("roll_back", mesh.trainer, 8, "a trainer that dies after the revert")
    assert (dropped, left) == (0, 1)
    tokens = await store.connection.command("ZRANGE", store.connection.keys.single("ready_tokens"), 0, -1, "WITHSCORES")
    assert {gid: int(count) for gid, count in tokens} == {b"e0-0": 7, b"e0-1": 9}
    assert await store.training.roll_back(mesh.trainer) == 2
    assert (await read_truth(store)).problems == []
