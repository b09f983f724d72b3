"""The whole life of groups on a real server."""

from __future__ import annotations

import numpy as np

from rollmesh.mesh import Cursor
from rollmesh.store import TrajectoryStore
from rollmesh.types import FinishReason, OutcomeKind

from .store_mesh import Mesh, group


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
    batch = await store.training.claim(mesh.trainer, 1, timeout=0.1)
    assert batch is not None
    assert [g.group_id for g in batch.groups] == ["e0-1", "e0-0"]
    trajectory = batch.groups[1].trajectories[1]
    assert trajectory.trajectory_id == "e0-0.1"
    assert trajectory.response_ids.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(trajectory.prompt.token_ids, np.arange(4))
    assert trajectory.finish_reason is FinishReason.STOP
    assert trajectory.outcome is not None
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
