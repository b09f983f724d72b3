"""Times that the scripts measure for an automatic pool. Records are set back instead of waiting."""

from __future__ import annotations

import pytest

from rollmesh.mesh import CachePool, Desired
from rollmesh.store import TrajectoryStore

from .store_mesh import Mesh, policy


async def set_back(store: TrajectoryStore, key: str, field: str, seconds: int) -> None:
    await store.connection.command("HINCRBY", key, field, -1000 * seconds)


async def admitted_before(mesh: Mesh, group_id: str, seconds: int) -> None:
    await set_back(mesh.store, mesh.store.connection.keys.of("group", group_id), "admitted_at", seconds)


async def test_a_ready_group_counts_from_its_admission_with_the_dropped_ones_before_it(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, filter_zero_variance=True)
    first = await store.mesh.view()
    await mesh.admit(2)
    await admitted_before(mesh, "e0-0", 5)
    await admitted_before(mesh, "e0-1", 20)
    assert (await store.mesh.view()).ready_seconds is None
    by_id = {item.trajectory.trajectory_id: item for item in await store.trajectories.lease(mesh.session, 4)}
    for name in ("e0-0.0", "e0-0.1"):
        await mesh.complete(by_id[name], 1.0)
    assert (await store.mesh.view()).ready_seconds is None, "filtered: no ready group has paid for it yet"
    for name, reward in (("e0-1.0", 0.0), ("e0-1.1", 1.0)):
        await mesh.complete(by_id[name], reward)
    last = await store.mesh.view()
    assert last.ready_seconds is not None
    assert 25 <= last.ready_seconds <= 25.001 + 2 * (last.now - first.now)  # times are whole milliseconds


async def test_time_before_the_end_of_a_pause_does_not_count(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    first = await store.mesh.view()
    await mesh.admit(1)
    await admitted_before(mesh, "e0-0", 3600)
    await store.settings.set_launcher_paused(True)
    await store.settings.set_launcher_paused(False)
    await mesh.complete_all()
    last = await store.mesh.view()
    assert last.ready_seconds is not None
    assert last.ready_seconds <= last.now - first.now + 0.001  # whole milliseconds


async def train(mesh: Mesh, step: int) -> None:
    await mesh.store.training.claim(mesh.trainer, step, 1.0)
    await mesh.store.training.confirm_batch_file(mesh.trainer, step, "d")
    await mesh.store.training.report_trained(mesh.trainer, step)


async def test_an_update_lasts_from_its_cut_to_its_announcement_and_the_next_cut_may_come_between(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    meta = store.connection.keys.single("meta")
    await mesh.admit(4)
    await mesh.complete_all()
    await set_back(store, meta, "announced_at", 100)
    first = await store.mesh.view()
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await set_back(store, meta, "cut_at", 7)
    await train(mesh, 1)
    await store.leadership.cut(mesh.leader, 2, ["e0-2", "e0-3"])
    assert (await store.mesh.view()).update_seconds is None
    await store.policies.announce(mesh.trainer, policy(1))
    one = await store.mesh.view()
    assert one.update_seconds is not None
    assert 7 <= one.update_seconds <= 7.001 + one.now - first.now  # times are whole milliseconds
    # The trainer was busy with step 1 when step 2 was cut, so step 2 began 11 s ago: 7 + (11 - 7) / 4 = 8.
    await set_back(store, meta, "cut_at", 50)
    await set_back(store, meta, "announced_at", 11)
    await train(mesh, 2)
    await store.policies.announce(mesh.trainer, policy(2))
    two = await store.mesh.view()
    assert two.update_seconds is not None
    assert 8 <= two.update_seconds <= 8.001 + two.now - first.now
    await store.policies.announce(mesh.trainer, policy(3, train_step=1))
    assert (await store.mesh.view()).update_seconds == two.update_seconds, "a rollback is no update"


async def test_an_update_that_another_trainer_finishes_has_no_time(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await mesh.admit(2)
    await mesh.complete_all()
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await set_back(store, store.connection.keys.single("meta"), "cut_at", 3600)
    mesh.trainer = await store.training.open_session("restarted")
    await train(mesh, 1)
    await store.policies.announce(mesh.trainer, policy(1))
    assert (await store.mesh.view()).update_seconds is None


async def test_the_time_to_ready_is_also_counted_in_whole_updates(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.connection.command("HSET", store.connection.keys.single("meta"), "update_ms", 1_000_000)
    await mesh.admit(2)
    await admitted_before(mesh, "e0-0", 2500)
    await admitted_before(mesh, "e0-1", 2500)
    await mesh.complete_all()
    assert (await store.mesh.view()).ready_updates == 2


@pytest.mark.parametrize("pool", [None, CachePool(size=24, since=1795436020.107, preemptions=3)])
async def test_the_state_of_an_automatic_pool_is_kept_for_the_next_leader(
    store: TrajectoryStore, pool: CachePool | None
) -> None:
    mesh = await Mesh.start(store)
    written = Desired(pool_size=3, cache_pool=pool)
    await store.leadership.set_desired(mesh.leader, written)
    assert (await store.mesh.view()).desired == written == await store.leadership.desired()
