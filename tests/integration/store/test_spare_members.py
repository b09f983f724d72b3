"""Groups with spare members: once enough members are scored, the others are cut off and counted as surplus."""

from __future__ import annotations

from rollmesh.store import ReleaseReason, TrajectoryStore, WriteStatus

from .store_mesh import Mesh, policy
from .stored_keys import read_truth


async def train(mesh: Mesh) -> None:
    """Train batch 1, which has the group e0-0."""
    await mesh.store.leadership.cut(mesh.leader, 1, ["e0-0"])
    await mesh.store.training.claim(mesh.trainer, 1, 1.0)
    await mesh.store.training.confirm_batch_file(mesh.trainer, 1, "digest")
    await mesh.store.training.report_trained(mesh.trainer, 1)


async def test_the_last_needed_score_cuts_off_members_in_every_state(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1, needed=2, spare=4)
    first, second, running, rested, finished = await store.trajectories.lease(mesh.session, 5)
    names = [item.trajectory.trajectory_id for item in (running, rested, finished)]
    await mesh.append(names[0], 0, 3)
    await mesh.append(names[1], 0, 4)
    await store.trajectories.release(mesh.session, [names[1]], ReleaseReason.PAUSED)
    await mesh.finish(names[2], 0, 6)
    await mesh.complete(first, 1.0)
    assert (await store.mesh.view()).open_groups == 1
    await mesh.complete(second, 0.0)
    view = await store.mesh.view()
    assert (view.ready_groups, view.leased, view.partial, view.pending, view.finished) == (1, 0, 0, 0, 0)
    counts = await store.mesh.counts()
    assert (counts.trajectories["surplus"], counts.totals["surplus_total"]) == (4, 4)
    assert counts.dropped_tokens == {"surplus": 3 + 4 + 6}
    assert (sum(counts.surplus_deciles.values()), counts.drop_deciles) == (4, {})
    assert (await read_truth(store)).problems == []
    assert await mesh.append(names[0], 3, 1) == WriteStatus.LOST
    assert await mesh.finish(names[0], 3, 1) == WriteStatus.LOST
    assert await mesh.score(names[2], 1.0) == WriteStatus.LOST
    assert await store.trajectories.lease(mesh.session, 8) == []


async def test_a_batch_has_the_scored_members_only_and_the_surplus_goes_with_its_group(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(1, needed=2, spare=1)
    first, second, third = await store.trajectories.lease(mesh.session, 3)
    await mesh.append(first.trajectory.trajectory_id, 0, 3)
    await mesh.complete(second, 1.0)
    await mesh.complete(third, 0.0)
    await store.leadership.cut(mesh.leader, 1, ["e0-0"])
    batch = await store.training.claim(mesh.trainer, 1, 1.0)
    assert batch is not None
    assert [t.trajectory_id for t in batch.groups[0].trajectories] == ["e0-0.1", "e0-0.2"]
    await train(mesh)
    counts = await store.mesh.counts()
    assert (counts.trajectories["surplus"], counts.totals["surplus_total"]) == (0, 1)
    assert counts.dropped_tokens == {"surplus": 3}
    assert (await read_truth(store)).problems == []


async def test_tokens_of_the_surplus_do_not_age_the_group(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.policies.announce(mesh.trainer, policy(1))
    await mesh.admit(1, needed=2, spare=1)
    old, first, second = await store.trajectories.lease(mesh.session, 3)
    await mesh.append(old.trajectory.trajectory_id, 0, 3, version=0)
    await mesh.complete(first, 1.0, version=1)
    assert [g.min_train_step for g in (await store.mesh.view()).stalest_open] == [0]
    await mesh.complete(second, 0.0, version=1)
    view = await store.mesh.view()
    assert [(g.group_id, g.min_train_step) for g in view.ready] == [("e0-0", 1)]
    assert view.unclaimed_by_step == ((1, 1),)


async def test_a_filtered_group_counts_its_surplus_once(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, filter_zero_variance=True)
    await mesh.admit(1, needed=2, spare=1)
    first, second, third = await store.trajectories.lease(mesh.session, 3)
    await mesh.append(third.trajectory.trajectory_id, 0, 3)
    await mesh.complete(first, 1.0)
    await mesh.complete(second, 1.0)
    counts = await store.mesh.counts()
    assert counts.dropped_tokens == {"surplus": 3, "filtered_all_right": 10}
    assert counts.trajectories["surplus"] == 0
    assert sum(counts.dropped_tokens.values()) == counts.totals["saved_tokens_total"]
    assert (await read_truth(store)).problems == []


async def test_members_without_a_score_are_replaced_up_to_the_most_members(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, most_members=5)
    await mesh.admit(1, needed=2, spare=2)
    for value in (None, None, None, 1.0):
        await mesh.complete((await store.trajectories.lease(mesh.session, 1))[0], value)
    view = await store.mesh.view()
    assert (view.open_groups, view.pending) == (1, 1), "four members and one replacement"
    await mesh.complete((await store.trajectories.lease(mesh.session, 1))[0], 0.0)
    assert (await store.mesh.view()).ready_groups == 1
    assert (await read_truth(store)).problems == []


async def test_a_group_without_spare_members_waits_for_its_forks(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, most_members=3)
    await mesh.admit(1)
    first, second = await store.trajectories.lease(mesh.session, 2)
    await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "a")
    refused = await store.trajectories.fork(mesh.session, first.trajectory.trajectory_id, "b")
    assert refused.status == "group_full"
    await mesh.complete(first, 1.0)
    await mesh.complete(second, 0.0)
    assert (await store.mesh.view()).open_groups == 1
