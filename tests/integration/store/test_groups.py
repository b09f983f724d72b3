"""Outcomes of groups on a real server: scores, replacements, filters, drops and their ledger."""

from __future__ import annotations

import numpy as np
import pytest

from rollmesh.errors import DataError
from rollmesh.mesh import Cursor
from rollmesh.store import Finish, Score, TrajectoryStore, WriteStatus
from rollmesh.types import FinishReason, OutcomeKind, RewardOutcome

from .store_mesh import UNSCORABLE, Mesh, group, scored, segment


async def test_a_fixed_value_for_a_time_out_scores_the_trajectory(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=1, leased=2)
    for trajectory_id in ("e0-0.0", "e0-0.1"):
        await mesh.finish(trajectory_id, 0, 2)
    outcome = RewardOutcome(kind=OutcomeKind.TIMED_OUT, message="10 s")
    fixed = Score(trajectory_id="e0-0.0", outcome=outcome, shaped_reward=-0.5, assigned=True)
    other = Score(trajectory_id="e0-0.1", outcome=scored(1.0), shaped_reward=1.0)
    await store.trajectories.score(mesh.session, [fixed, other])
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    batch = await mesh.claim(1)
    trajectory = batch.groups[0].trajectories[0]
    assert trajectory.shaped_reward == -0.5
    assert trajectory.outcome == outcome


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


async def test_a_group_goes_from_admission_to_trained_and_leaves_nothing_but_a_tombstone(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    assert await mesh.admit(2) == 2
    assert await mesh.complete_all() == 4
    view = await store.mesh.view()
    assert [g.group_id for g in view.ready] == ["e0-0", "e0-1"]
    assert [g.min_train_step for g in view.ready] == [0, 0]

    await store.leadership.cut(mesh.leader, 1, ["e0-1", "e0-0"])
    batch = await mesh.claim(1)
    assert [g.group_id for g in batch.groups] == ["e0-1", "e0-0"]
    trajectory = batch.groups[1].trajectories[1]
    assert trajectory.trajectory_id == "e0-0.1"
    assert trajectory.response_ids.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(trajectory.prompt.token_ids, np.arange(4))
    assert trajectory.finish_reason is FinishReason.STOP
    assert trajectory.outcome.kind is OutcomeKind.SCORED
    assert trajectory.outcome.parts == {"exact": 1.0}
    assert trajectory.shaped_reward == 1.0

    await store.training.confirm_batch_file(mesh.trainer, 1, "d1")
    assert (await store.mesh.view()).admitted_unconsumed == 2
    await store.training.report_trained(mesh.trainer, 1)
    view = await store.mesh.view()
    assert (view.trained_step, view.cut_step, view.admitted_unconsumed) == (1, 1, 0)
    leftovers = await store.connection.command("KEYS", f"{store.connection.keys.prefix}[tspgbuch]*:*")
    assert leftovers == []
    # An old cursor cannot bring a trained group back.
    await store.connection.command("HSET", store.connection.keys.single("meta"), "cursor_index", 0)
    admitted = await store.leadership.admit(
        mesh.leader, [group(0), group(1), group(2)], Cursor(index=0), Cursor(index=3)
    )
    assert admitted == 1
