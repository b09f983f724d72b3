"""Cuts, claims, the steps of the trainer with their reports, and the times measured between them."""

import asyncio
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import Conflict, SessionLost
from rollmesh.mesh import CachePool, Desired
from rollmesh.store import KEPT_REPORTS, TrajectoryStore

from .store_mesh import Mesh, policy


async def test_a_cut_needs_the_next_step_ready_groups_and_fresh_tokens(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0, groups=3, completed=True)
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
    await mesh.train(1)
    with pytest.raises(Conflict, match="staleness 1, over the bound of 0"):
        await store.leadership.cut(mesh.leader, 2, ["e0-1"])


async def test_masking_old_segments_keeps_stale_groups_within_the_bound(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, max_staleness=0, mask_old_segments=True, groups=2, completed=True)
    for step, gid in ((1, "e0-0"), (2, "e0-1")):
        assert (await store.mesh.view()).ready[0].min_train_step == step - 1
        await mesh.train(step, [gid])


async def test_a_claim_waits_for_its_cut(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2, completed=True)
    assert await store.training.claim(mesh.trainer, 1, 0.02) is None
    waiting = asyncio.create_task(store.training.claim(mesh.trainer, 1, 10.0))
    await asyncio.sleep(0)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    batch = await waiting
    assert batch.train_step == 1
    again = await store.training.claim(mesh.trainer, 1, 0.1)
    assert [g.group_id for g in again.groups] == ["e0-0", "e0-1"]


async def test_a_batch_of_small_and_large_groups_is_claimed_whole_and_in_order(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups_per_batch=4, groups=4)
    # The second is over what comes along with a claim, and has chunks of its own; the third uses up what is left.
    lengths = {"e0-0": (3, 3), "e0-1": (9000, 30_000), "e0-2": (16_000, 16_700), "e0-3": (50, 70)}
    for leased in await store.trajectories.lease(mesh.session, 8):
        trajectory = leased.trajectory
        tokens = lengths[trajectory.group_id][trajectory.member_index]
        assert await mesh.append(trajectory.trajectory_id, 0, 2) == 1
        assert await mesh.finish(trajectory.trajectory_id, 2, tokens - 2) == 1
        assert await mesh.score(trajectory.trajectory_id, float(trajectory.member_index)) == 1
    await store.leadership.cut(mesh.leader, 1, list(lengths))
    batch = await mesh.claim(1)
    assert {g.group_id: tuple(t.response_token_count for t in g.trajectories) for g in batch.groups} == lengths
    for found in batch.groups:
        for trajectory in found.trajectories:
            ids = np.concatenate([part.token_ids for part in trajectory.segments])
            assert ids.tolist() == list(range(trajectory.response_token_count))
            assert trajectory.shaped_reward == trajectory.member_index


def reports(*steps: int, attempt: int = 0) -> list[dict[str, Any]]:
    return [{"train_step": step, "attempt": attempt, "batch": {"outcome_mean": 0.1 + step}} for step in steps]


async def test_reports_come_back_as_they_were_written_from_any_step_on(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    assert await store.step_reports.read(0, 10) == []
    for step in range(1, 13):
        await store.step_reports.write(mesh.trainer, step - 1, reports(step))
    assert await store.step_reports.read(0, 99) == reports(*range(1, 13))
    assert await store.step_reports.read(9, 3) == reports(9, 10, 11)
    assert await store.step_reports.read(13, 3) == []


async def test_a_step_that_is_trained_again_takes_the_place_of_itself_and_all_later_ones(
    store: TrajectoryStore,
) -> None:
    mesh = await Mesh.start(store)
    await store.step_reports.write(mesh.trainer, 0, reports(1, 2, 3, 4, 5))
    for _ in range(2):
        await store.step_reports.write(mesh.trainer, 2, reports(3, attempt=1))
        assert await store.step_reports.read(0, 99) == reports(1, 2) + reports(3, attempt=1)
    await store.step_reports.write(mesh.trainer, 1)
    assert await store.step_reports.read(0, 99) == reports(1)
    await store.step_reports.write(mesh.trainer, 0)
    assert await store.step_reports.read(0, 99) == []


async def test_the_newest_reports_stay(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    # In several calls, and repeated, as a trainer does whose Redis lost them.
    for _ in range(2):
        await store.step_reports.write(mesh.trainer, 0, reports(*range(1, KEPT_REPORTS + 11)))
    found = await store.step_reports.read(0, 2 * KEPT_REPORTS)
    assert [report["train_step"] for report in found] == list(range(11, KEPT_REPORTS + 11))
    await store.step_reports.write(mesh.trainer, KEPT_REPORTS + 10, reports(KEPT_REPORTS + 11))
    found = await store.step_reports.read(0, 2 * KEPT_REPORTS)
    assert [report["train_step"] for report in found] == list(range(12, KEPT_REPORTS + 12))


async def test_a_trainer_that_was_replaced_reports_nothing(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store)
    await store.step_reports.write(mesh.trainer, 0, reports(1, 2))
    second = await store.training.open_session("second")
    for records in (reports(2, attempt=1), []):
        with pytest.raises(SessionLost):
            await store.step_reports.write(mesh.trainer, 1, records)
    assert await store.step_reports.read(0, 99) == reports(1, 2)
    await store.step_reports.write(second, 1, reports(2, attempt=2))
    assert await store.step_reports.read(0, 99) == reports(1) + reports(2, attempt=2)


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
    await mesh.train(1)
    await store.leadership.cut(mesh.leader, 2, ["e0-2", "e0-3"])
    assert (await store.mesh.view()).update_seconds is None
    await store.policies.announce(mesh.trainer, policy(1))
    one = await store.mesh.view()
    assert one.update_seconds is not None
    assert 7 <= one.update_seconds <= 7.001 + one.now - first.now  # times are whole milliseconds
    # The trainer was busy with step 1 when step 2 was cut, so step 2 began 11 s ago: 7 + (11 - 7) / 4 = 8.
    await set_back(store, meta, "cut_at", 50)
    await set_back(store, meta, "announced_at", 11)
    await mesh.train(2)
    await store.policies.announce(mesh.trainer, policy(2))
    two = await store.mesh.view()
    assert two.update_seconds is not None
    assert 8 <= two.update_seconds <= 8.001 + two.now - first.now
    await store.policies.announce(mesh.trainer, policy(3, train_step=1))
    assert (await store.mesh.view()).update_seconds == two.update_seconds, "a rollback is no update"


async def test_an_update_that_another_trainer_finishes_has_no_time(store: TrajectoryStore) -> None:
    mesh = await Mesh.start(store, groups=2, completed=True)
    await store.leadership.cut(mesh.leader, 1, ["e0-0", "e0-1"])
    await set_back(store, store.connection.keys.single("meta"), "cut_at", 3600)
    mesh.trainer = await store.training.open_session("restarted")
    await mesh.train(1)
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
