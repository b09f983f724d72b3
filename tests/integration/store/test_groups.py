"""Outcomes of groups on a real server: scores, replacements, filters, drops and their ledger."""

from __future__ import annotations

import pytest

from rollmesh.errors import DataError
from rollmesh.store import Finish, Score, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason

from .store_mesh import UNSCORABLE, Mesh, scored, segment


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
