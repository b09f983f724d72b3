"""Cuts, claims and the trainer's steps on a real server."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, policy
from .stored_keys import read_truth


async def test_a_cut_needs_the_next_step_ready_groups_and_fresh_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0)
    await mesh.admit(3)
    await mesh.complete_all()
    with pytest.raises(Conflict, match="cut_step is 0"):
        await store.leadership.cut(mesh.leader, 2, ["e0-0"])
    with pytest.raises(Conflict, match="e0-9 is not ready"):
        await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-9"])
    with pytest.raises(Conflict, match="listed twice"):
        await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-0"])
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    with pytest.raises(Conflict):
        await store.leadership.cut(mesh.leader, 1, ["e0-1"])
    with pytest.raises(Conflict, match="trained_step is 0"):
        await store.leadership.cut(mesh.leader, 2, ["e0-1"])
    await store.training.claim(mesh.trainer, 1, 1.0)
    await store.training.confirm_batch_file(mesh.trainer, 1, "d")
    await store.training.report_trained(mesh.trainer, 1)
    with pytest.raises(Conflict, match="staleness 1, over the bound of 0"):
        await store.leadership.cut(mesh.leader, 2, ["e0-1"])
    assert (await read_truth(store)).problems == []


async def test_masking_old_segments_keeps_stale_groups_within_the_bound(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0, mask_old_segments=True)
    await mesh.admit(2)
    await mesh.complete_all()
    for step, gid in ((1, "e0-0"), (2, "e0-1")):
        assert (await store.mesh.view()).ready[0].min_train_step == step - 1
        await store.leadership.cut(mesh.leader, step, [gid])
        await store.training.claim(mesh.trainer, step, 1.0)
        await store.training.confirm_batch_file(mesh.trainer, step, "d")
        await store.training.report_trained(mesh.trainer, step)


async def test_a_claim_waits_for_its_cut(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await mesh.complete_all()
    assert await store.training.claim(mesh.trainer, 1, 0.02) is None
    waiting = asyncio.create_task(store.training.claim(mesh.trainer, 1, 10.0))
    await asyncio.sleep(0)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    batch = await waiting
    assert batch is not None
    assert batch.train_step == 1
    again = await store.training.claim(mesh.trainer, 1, 0.1)
    assert again is not None
    assert [g.group_id for g in again.groups] == ["e0-0", "e0-1"]


async def test_a_batch_of_small_and_large_groups_is_claimed_whole_and_in_order(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups_per_batch=4)
    await mesh.admit(4)
    # The second is over what comes along with a claim, and has chunks of its own; the third uses up what is left.
    lengths = {"e0-0": (3, 3), "e0-1": (9000, 30_000), "e0-2": (16_000, 16_700), "e0-3": (50, 70)}
    for leased in await store.trajectories.lease(mesh.session, 8):
        trajectory = leased.trajectory
        tokens = lengths[trajectory.group_id][trajectory.member_index]
        assert await mesh.append(trajectory.trajectory_id, 0, 2) == 1
        assert await mesh.finish(trajectory.trajectory_id, 2, tokens - 2) == 1
        assert await mesh.score(trajectory.trajectory_id, float(trajectory.member_index)) == 1
    await store.leadership.cut(mesh.leader, 1, list(lengths))
    batch = await store.training.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    assert {g.group_id: tuple(t.response_token_count for t in g.trajectories) for g in batch.groups} == lengths
    for found in batch.groups:
        for trajectory in found.trajectories:
            ids = np.concatenate([part.token_ids for part in trajectory.segments])
            assert ids.tolist() == list(range(trajectory.response_token_count))
            assert trajectory.shaped_reward == trajectory.member_index


async def test_every_step_of_the_trainer_may_be_repeated(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    with pytest.raises(Conflict, match="not been confirmed"):
        await store.training.report_trained(mesh.trainer, 1)
    await store.training.claim(mesh.trainer, 1, 1.0)
    for _ in range(2):
        await store.training.confirm_batch_file(mesh.trainer, 1, "d")
    with pytest.raises(Conflict, match="another digest"):
        await store.training.confirm_batch_file(mesh.trainer, 1, "e")
    with pytest.raises(Conflict, match="read it from the checkpoint store"):
        await store.training.claim(mesh.trainer, 1, 0.1)
    for _ in range(2):
        await store.training.report_trained(mesh.trainer, 1)
        await store.training.report_committed(mesh.trainer, 1)
        await store.training.confirm_batch_file(mesh.trainer, 1, "d")
    with pytest.raises(Conflict, match="already trained"):
        await store.training.claim(mesh.trainer, 1, 0.1)
    state = await store.training.state()
    assert (state.trained_step, state.cut_step, state.committed_step) == (1, 1, 1)
    assert (await store.mesh.counts()).totals["consumed_total"] == 2
    truth = await read_truth(store)
    assert (truth.problems, truth.tombstones) == ([], {"e0-0", "e0-1"})


async def test_only_the_newest_trainer_session_counts(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    second = await store.training.open_session("second")
    with pytest.raises(SessionLost):
        await store.policies.announce(mesh.trainer, policy(1))
    with pytest.raises(SessionLost):
        await store.training.claim(mesh.trainer, 1, 0.01) or await store.training.report_trained(mesh.trainer, 1)
    await store.policies.announce(second, policy(1))
