"""Whole simulated meshes: work is conserved, promises hold, equal seeds give equal output, failures have a bound."""

import gc
from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest

from rollmesh.scheduling.presets import PRESETS
from rollmesh.sim.figures import figures
from rollmesh.sim.queue_model import ModelGroup, ModelMember
from rollmesh.sim.simulated_mesh import SimulatedMesh

from .meshes import assert_conserved, mesh_settings, run

EVERY_FAILURE = (
    "deaths_per_hour=200",
    "spot_reclaims_per_hour=200",
    "back_seconds=3",
    "late_generators=1",
    "late_seconds=5",
    "slow_generators=1",
    "trainer_crashes_per_hour=200",
    "trainer_lost_seconds=1",
    "leader_gaps_per_hour=20",
)


def count_of_kinds() -> Counter[type]:
    """The objects of this process that the garbage collector knows, by their class."""
    return Counter(type(each) for each in gc.get_objects())


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("failures", [(), EVERY_FAILURE], ids=["no failure", "every failure"])
def test_every_preset_trains_every_step_and_conserves_work(preset, failures):
    mesh, result = run(mesh_settings(preset, failures=failures))
    assert [update.train_step for update in result.updates] == [1, 2, 3, 4, 5, 6]
    assert all(update.trajectories == 16 for update in result.updates)
    assert_conserved(mesh, result)


def test_groups_of_more_members_than_the_store_resets_at_once_are_reset_and_deleted_like_others():
    mesh, result = run(mesh_settings("rollpacker", steps=3, group_size=104))
    assert mesh.queue.totals["groups_set_aside_total"] > 0
    assert_conserved(mesh, result)


@pytest.mark.parametrize("preset", ["ulorl", "kimi"])
@pytest.mark.parametrize("mode", ["interrupt", "keep_kv", "drain"])
def test_trajectories_that_rest_conserve_work_under_every_effect_of_a_new_version(preset, mode):
    settings = mesh_settings(preset, segment_tokens=100, generator={"on_new_version": mode}, failures=EVERY_FAILURE)
    mesh, result = run(settings)
    assert mesh.worker.rest_count > 0
    assert_conserved(mesh, result)


def test_an_update_is_no_bubble_of_a_rollout_that_rests_during_it():
    _, result = run(mesh_settings("sync"))
    found, work = figures(result, 8), result.work[-1].since(result.work[0])
    rollout = sum(update.trainer_wait_seconds for update in result.updates[1:])
    assert found.rollout_bubble_ratio == pytest.approx(1 - work.running_slot_seconds / (4 * 8 * rollout))
    assert found.rollout_bubble_ratio < found.bubble_ratio
    overlaps = figures(run(mesh_settings("copris"))[1], 8)
    assert overlaps.rollout_bubble_ratio == overlaps.bubble_ratio


def test_sorted_waves_keep_the_slots_full_and_partial_answers_also_at_the_end_of_a_wave():
    """SortedRL reports 74% for synchronous rollout, and 6% and 3% for its two modes."""
    sizes = {"groups_per_batch": 8}, {"groups_per_batch": 32}
    sync, sorted_, partial = (
        figures(run(mesh_settings(preset, steps=17, **sizes[preset != "sync"]))[1], 8).rollout_bubble_ratio
        for preset in ("sync", "sorted", "sorted_partial")
    )
    assert sync > 0.5 and sorted_ < 0.6 * sync and partial < 0.2 * sync


def test_kimi_masks_the_tokens_of_earlier_policies():
    _, result = run(mesh_settings("kimi"))
    found = figures(result, 8)
    assert found.off_policy_token_share == 0 and set(found.staleness) == {0}
    assert result.wasted_tokens["masked"] > 0


@pytest.mark.parametrize("mode", ["interrupt", "keep_kv", "drain"])
def test_every_effect_of_a_new_version_conserves_work(mode):
    mesh, result = run(mesh_settings("copris", generator={"on_new_version": mode}))
    assert_conserved(mesh, result)
    assert figures(result, 8).version_span == 0 if mode == "drain" else figures(result, 8).version_span > 0


@pytest.mark.parametrize("seed", range(3))
def test_a_draining_generator_loads_also_if_its_last_call_is_stopped(seed):
    drained = {"replicas": 1, "on_new_version": "drain"}
    mesh, result = run(mesh_settings("copris", seed=seed, generator=drained, groups_per_batch=2, spare_members=1))
    assert len(result.updates) == 6
    assert result.wasted_tokens["surplus"] > 0
    assert_conserved(mesh, result)


def test_a_small_cache_preempts_and_conserves_work():
    mesh, result = run(mesh_settings("copris", cache_tokens=1600))
    assert result.work[-1].preemptions > 0
    assert_conserved(mesh, result)


def test_equal_seeds_give_equal_output_and_another_seed_another_one():
    settings = mesh_settings("copris", failures=EVERY_FAILURE)
    assert run(settings)[1] == run(settings)[1]
    assert run(mesh_settings("copris", seed=1, failures=EVERY_FAILURE))[1] != run(settings)[1]


@pytest.mark.parametrize("preset", ["copris", "roll", "sorted", "rollpacker"])
def test_ended_groups_leave_no_record_although_no_garbage_is_collected(preset):
    gc.collect()
    gc.disable()
    try:
        before = count_of_kinds()
        mesh, _ = run(mesh_settings(preset))
        after = count_of_kinds()
    finally:
        gc.enable()
    assert after[ModelGroup] - before[ModelGroup] == sum(map(len, mesh.queue.groups.values()))
    assert after[ModelMember] - before[ModelMember] == len(mesh.queue.members)


def test_sync_trains_only_on_the_newest_policy_and_copris_is_faster():
    sync, copris = (figures(run(mesh_settings(name))[1], 8) for name in ("sync", "copris"))
    assert sync.off_policy_token_share == 0 and set(sync.staleness) == {0}
    assert copris.off_policy_token_share > 0
    assert copris.updates_per_hour > sync.updates_per_hour


def test_a_dead_generator_loses_less_than_one_save_interval_per_rollout():
    deaths = ("deaths_per_hour=400", "back_seconds=2")
    _, result = run(mesh_settings("copris", failures=deaths))
    assert 0 < result.wasted_tokens["generator_death"] < result.finished * 64
    _, saves_every_token = run(mesh_settings("copris", failures=deaths, rollout={"partial_save_tokens": 1}))
    assert "generator_death" not in saves_every_token.wasted_tokens


def test_a_spot_reclaim_loses_no_token():
    _, result = run(mesh_settings("copris", failures=("spot_reclaims_per_hour=400", "back_seconds=2")))
    assert "spot_reclaim" not in result.wasted_tokens
    assert result.work[-1].reprefilled_tokens > 0


def test_a_colocated_trainer_takes_longer_for_an_update_than_one_with_its_own_devices():
    own, shared = (figures(run(mesh_settings("sync", colocated=c))[1], 8) for c in (False, True))
    assert shared.update_seconds_p50 > own.update_seconds_p50


@pytest.mark.parametrize("colocated", [False, True])
def test_a_trainer_that_crashes_again_before_it_is_back_only_starts_later(colocated):
    settings = mesh_settings("copris", steps=2, colocated=colocated)
    _, calm = run(settings)
    cut_at, trained_at = calm.updates[0].cut_at, calm.updates[0].trained_at
    mesh = SimulatedMesh(settings, check=True)
    crash_at = (cut_at + trained_at) / 2
    for after in (0, 50):
        mesh.clock.call_at(crash_at + after, lambda: mesh.trainer.crash(back_after=100, lost_seconds=5))
    crashed = mesh.run()
    assert crashed.updates[0].trained_at == pytest.approx(crash_at + 50 + 105 + trained_at - cut_at)
    if colocated:
        # The trainer keeps the devices: nothing is decoded but the step in progress at the claim.
        assert crashed.work[0].decoded_tokens == calm.work[0].decoded_tokens
    else:
        assert crashed.work[0].decoded_tokens > calm.work[0].decoded_tokens


@pytest.mark.parametrize(("preset", "part_groups"), [("copris", 0), ("sync", 1)])
def test_a_trainer_that_crashes_while_it_waits_for_a_batch_claims_it_once_it_is_back(preset, part_groups):
    settings = mesh_settings(preset, steps=2, part_groups=part_groups)
    _, calm = run(settings)
    first = calm.updates[0]
    mesh = SimulatedMesh(settings, check=True)
    crash_at = first.cut_at - 0.5
    mesh.clock.call_at(crash_at, lambda: mesh.trainer.crash(back_after=100, lost_seconds=50))
    crashed = mesh.run().updates[0]
    assert crashed.cut_at == pytest.approx(crash_at + 150)
    assert crashed.trained_at - crashed.cut_at == pytest.approx(settings.trainer.train_seconds(tokens=crashed.tokens))


def test_an_automatic_pool_fits_small_caches():
    auto, fixed = (run(mesh_settings("copris", steps=12, cache_tokens=1600, pool_size=size)) for size in ("auto", 64))
    assert auto[0].queue.desired.cache_pool is not None
    assert 0 < auto[0].queue.desired.pool_size < 20
    assert auto[1].work[-1].preemptions < fixed[1].work[-1].preemptions / 3
    assert_conserved(*auto)


def test_an_automatic_pool_follows_the_trainer_while_the_caches_are_large():
    mesh, result = run(mesh_settings("copris", steps=12, pool_size="auto"))
    times = mesh.queue.times
    durations = [b.trained_at - b.cut_at for b in result.updates]
    assert times.update_seconds == pytest.approx(sum(durations) / len(durations) + 0.5, rel=0.2)  # And publication.
    assert times.ready_seconds > times.update_seconds
    assert result.work[-1].preemptions == 0 and mesh.queue.desired.pool_size > 20


def published_in(preset, seconds, background, **settings):
    mesh = mesh_settings(preset, steps=12, **settings)
    return run(replace(mesh, trainer=replace(mesh.trainer, publication_seconds=seconds, background_seconds=background)))


@pytest.mark.parametrize("preset", PRESETS)
def test_publications_in_the_background_break_no_promise(preset):
    mesh, result = published_in(preset, 0.5, 0.4, failures=EVERY_FAILURE)
    assert len(result.updates) == 12
    assert_conserved(mesh, result)


def test_a_publication_in_the_background_saves_the_trainer_its_time_unless_generators_wait_for_it():
    (_, serial), (_, background) = (published_in("copris", 6.0, part) for part in (0.0, 5.9))
    assert background.seconds < 0.85 * serial.seconds
    assert published_in("sync", 1.0, 0.9)[1].seconds == pytest.approx(published_in("sync", 1.0, 0.0)[1].seconds)


def test_a_step_is_not_reported_before_the_policy_of_the_step_before_is_announced():
    _, result = published_in("copris", 8.0, 7.9, pool_size=24)
    gaps = [later.trained_at - earlier.trained_at for earlier, later in pairwise(result.updates)]
    assert gaps == pytest.approx([8.0] * 11)


def test_a_trainer_in_parts_finishes_sooner_after_the_cut():
    whole, parts = (run(mesh_settings("sync", part_groups=part))[1] for part in (0, 1))
    durations = [sum(update.trained_at - update.cut_at for update in result.updates) for result in (whole, parts)]
    assert durations[1] < durations[0]
