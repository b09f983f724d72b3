import pytest

from rollmesh.config.schedule import ScheduleConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import AdmissionRule, OnStale, expected_staleness, resolve_schedule


@pytest.mark.parametrize(
    ("preset", "staleness", "pool", "admission", "barrier"),
    [
        ("sync", 0, 128, AdmissionRule.BATCH, False),
        ("one_step_off", 1, 128, AdmissionRule.BATCH, False),
        ("copris", 4, 192, AdmissionRule.POOL, False),
        ("copris_paper", 8, 256, AdmissionRule.POOL, True),
        ("areal", 4, 128, AdmissionRule.CONCURRENCY, False),
    ],
)
def test_presets_resolve_to_their_documented_numbers(preset, staleness, pool, admission, barrier):
    schedule = resolve_schedule(ScheduleConfig(preset=preset, groups_per_batch=16, group_size=8), train_steps=40)
    assert (schedule.max_staleness, schedule.pool_size) == (staleness, pool)
    assert (schedule.admission, schedule.barrier) == (admission, barrier)
    assert schedule.on_stale is OnStale.PACE
    assert schedule.max_filtered_in_a_row == 160


def test_overrides_replace_the_defaults_of_the_preset():
    config = ScheduleConfig(
        preset="copris", groups_per_batch=4, group_size=2, pool_size=10, max_staleness=2, max_filtered_in_a_row=7
    )
    schedule = resolve_schedule(config, train_steps=3)
    assert (schedule.pool_size, schedule.max_staleness, schedule.max_filtered_in_a_row) == (10, 2, 7)
    assert schedule.pool_groups == 5
    assert schedule.capacity_groups == 12


def test_an_odd_batch_rounds_the_copris_pool_up_to_whole_groups():
    schedule = resolve_schedule(ScheduleConfig(preset="copris", groups_per_batch=3, group_size=4), train_steps=1)
    assert schedule.pool_size == 5 * 4


def test_the_default_pool_shrinks_to_a_tight_staleness_bound():
    config = ScheduleConfig(preset="copris", groups_per_batch=4, group_size=2, max_staleness=0)
    assert resolve_schedule(config, train_steps=1).pool_size == 8


def test_a_pool_above_the_staleness_capacity_is_refused_and_both_numbers_are_named():
    config = ScheduleConfig(preset="copris", groups_per_batch=4, group_size=2, pool_size=25, max_staleness=2)
    with pytest.raises(ConfigError, match=r"pool_size=25 .* = 24: with schedule.max_staleness=2"):
        resolve_schedule(config, train_steps=1)


@pytest.mark.parametrize(("preset", "fixed"), [("sync", 0), ("one_step_off", 1)])
def test_a_preset_that_is_its_staleness_refuses_another(preset, fixed):
    with pytest.raises(ConfigError, match=f"is max_staleness={fixed} by definition"):
        resolve_schedule(ScheduleConfig(preset=preset, max_staleness=3), train_steps=1)


@pytest.mark.parametrize(
    ("preset", "pool", "expected"), [("sync", None, 0.0), ("copris", None, 1.5), ("areal", 640, 4.0)]
)
def test_expected_staleness_is_littles_law_within_the_bound(preset, pool, expected):
    config = ScheduleConfig(preset=preset, groups_per_batch=16, group_size=8, pool_size=pool)
    assert expected_staleness(resolve_schedule(config, train_steps=40)) == expected
