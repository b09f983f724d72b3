import functools

import pytest
import yaml

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import AdmissionRule, OnStale, Schedule, run_limits
from rollmesh.scheduling.presets import PRESETS

from .views import RUN, schedule


@pytest.mark.parametrize(
    ("preset", "staleness", "pool", "admission", "barrier"),
    [
        ("sync", 0, 128, AdmissionRule.WAVE, False),
        ("one_step_off", 1, 128, AdmissionRule.WAVE, False),
        ("copris", 4, 192, AdmissionRule.POOL, False),
        ("copris_paper", 8, 256, AdmissionRule.POOL, True),
        ("areal", 4, 128, AdmissionRule.CONCURRENCY, False),
        ("april", 5, 256, AdmissionRule.WAVE, True),
        ("sorted_partial", 4, 64, AdmissionRule.WAVE, True),
        ("ulorl", 7, 256, AdmissionRule.WAVE, True),
        ("pipeline", 1, 256, AdmissionRule.POOL, False),
        ("roll", 1, 256, AdmissionRule.POOL, False),
        ("dart", 2, 192, AdmissionRule.POOL, False),
    ],
)
def test_presets_resolve_to_their_documented_numbers(preset, staleness, pool, admission, barrier):
    resolved = schedule(preset, groups_per_batch=16, group_size=8)
    assert (resolved.max_staleness, resolved.pool_size) == (staleness, pool)
    assert (resolved.admission, resolved.barrier) == (admission, barrier)
    assert resolved.on_stale is (OnStale.EVICT if preset == "roll" else OnStale.PACE)
    assert resolved.window_groups == (32 if preset == "dart" else (staleness + 1) * 16)
    assert resolved.wave_batches == (4 if preset == "sorted_partial" else 1)
    assert resolved.spare_groups == (16 if preset in ("april", "sorted_partial", "ulorl") else 0)
    assert resolved.group_size * resolved.prompt_repeats == 8
    assert resolved.max_filtered_in_a_row == 160
    assert (resolved.longest_trajectory_tokens, resolved.partial_save_tokens) == (512, 64)


def test_overrides_replace_the_defaults_of_the_preset():
    resolved = schedule(groups_per_batch=4, pool_size=10, max_staleness=2, max_filtered_in_a_row=7, train_steps=3)
    assert (resolved.pool_size, resolved.max_staleness, resolved.max_filtered_in_a_row) == (10, 2, 7)
    assert resolved.train_steps == 3
    assert resolved.pool_groups == 5
    assert resolved.window_groups == 12


def test_parts_need_a_batch_that_is_known_before_its_cut():
    with pytest.raises(ConfigError, match="schedule.part_groups=4: schedule.preset=copris .* take a preset"):
        schedule("copris", groups_per_batch=16, part_groups=4)
    assert schedule("sync", groups_per_batch=16, part_groups=4).groups_per_batch == 16


def test_an_odd_batch_rounds_the_copris_pool_up_to_whole_groups():
    assert schedule(groups_per_batch=3, group_size=4).pool_size == 5 * 4


def test_the_default_pool_shrinks_to_a_tight_staleness_bound():
    assert schedule(groups_per_batch=4, max_staleness=0).pool_size == 8


def test_a_pool_above_the_staleness_capacity_is_refused_and_both_numbers_are_named():
    with pytest.raises(ConfigError, match=r"pool_size=25 .* = 24: with schedule.max_staleness=2"):
        schedule(groups_per_batch=4, pool_size=25, max_staleness=2)


@pytest.mark.parametrize(("preset", "fixed"), [("sync", 0), ("one_step_off", 1)])
def test_a_preset_that_is_its_staleness_refuses_another(preset, fixed):
    with pytest.raises(ConfigError, match=f"is max_staleness={fixed} by definition"):
        schedule(preset, max_staleness=3)


@pytest.mark.parametrize(
    ("preset", "pool", "expected"),
    [("sync", None, 0.0), ("copris", None, 1.0), ("copris", 192, 1.5), ("areal", 640, 4.0)],
)
def test_expected_staleness_is_littles_law_within_the_bound(preset, pool, expected):
    assert schedule(preset, groups_per_batch=16, group_size=8, pool_size=pool).expected_staleness == expected


@pytest.mark.parametrize(("preset", "lag", "staleness"), [("pipeline", 1, 1), ("roll", 6, 2), ("copris", 1, 4)])
def test_a_window_sets_the_staleness_of_a_preset_whose_source_has_a_lag_in_groups(preset, lag, staleness):
    resolved = schedule(preset, groups_per_batch=4, window_groups=4 + lag)
    assert (resolved.window_groups, resolved.max_staleness) == (4 + lag, staleness)


def test_spare_groups_shrink_to_a_small_window_unless_they_are_set():
    assert schedule("april", groups_per_batch=4, max_staleness=0).spare_groups == 0
    assert schedule("april", groups_per_batch=4, window_groups=7).spare_groups == 3
    with pytest.raises(ConfigError, match="= 1 \\* 4 \\+ 4 = 8 is above the window of 7 groups"):
        schedule("april", groups_per_batch=4, window_groups=7, spare_groups=4)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("copris window_groups=3", "=3 is below schedule.groups_per_batch=4.*raise it to at least 4"),
        ("copris window_groups=21", r"=21 is above .*= \(4 \+ 1\) \* 4 = 20.*set at most 20"),
        ("copris spare_groups=1", "=1: schedule.preset=copris opens no waves.*april, flexmarl, kimi, one_step_off"),
        ("areal wave_batches=2", "wave_batches=2: schedule.preset=areal opens no waves"),
        ("sync wave_batches=2", r"= 2 \* 4 \+ 0 = 8 is above the window of 4 groups.* lower wave_batches;"),
        ("sync spare_groups=1", "lower spare_groups; schedule.preset=sync opens no more groups at once$"),
        ("sync pool_size=9", "lower pool_size; schedule.preset=sync opens no more groups at once$"),
        ("sync window_groups=5", "set at most 4, or take another on_stale$"),
        ("one_step_off window_groups=7 spare_groups=4", "lower spare_groups, or raise window_groups$"),
        ("rollpacker spare_groups=4", "lower spare_groups, or raise window_groups$"),
        ("april window_groups=4 spare_groups=1", "spare_groups, or raise window_groups or max_staleness$"),
        ("copris spare_members=1 pool_size=61", r"pool_size=61 is above .* = 20 \* \(2 \+ 1\) = 60"),
        ("sorted pool_size=99", r"window_groups \* \(members of a group \+ spare_members\) = 16 \* \(1 \+ 0\)"),
    ],
)
def test_values_that_contradict_each_other_are_refused_with_the_remedy(settings, message):
    preset, *items = settings.split()
    with pytest.raises(ConfigError, match=message):
        schedule(preset, groups_per_batch=4, **{name: int(value) for name, value in (i.split("=") for i in items)})


AGENT = "rollout.program=agent evaluation.before_and_after=false evaluation.every_versions=0"
BATCH = "trainer.algorithm.advantage=reinforce_pp"


@pytest.mark.parametrize(
    ("preset", "settings", "message"),
    [
        ("sync", "generator.reload_every_versions=2", "no effect; lower it$"),
        ("sync", "schedule.part_groups=5", "=5 does not divide schedule.groups_per_batch=16"),
        (
            "flexmarl",
            "trainer.minibatches=2",
            "=4 accumulates .* set trainer.minibatches=1 or part_groups=0",
        ),
        (
            "flexmarl",
            'model.adapter={"dropout":0.1} generator.on_new_version=next_slice',
            "part_groups=4 with model.adapter.dropout=0.1: .* set model.adapter.dropout=0 or part_groups=0",
        ),
        ("april", "schedule.part_groups=4", "april may cut other groups.*without spare groups"),
        ("streamrl", "checkpoints.state_every_steps=2", "part_groups=2 with .*state_every_steps=1 or part_groups=0"),
        ("april", "schedule.on_stale=set_aside", "on_stale=set_aside with max_staleness=5.*set max_staleness=0"),
        ("rollpacker", "schedule.on_stale=restart", "on_stale=restart with spare_groups=4.*set spare_groups=0"),
        ("rollpacker", AGENT, "spare_members=2: with rollout.program=agent the mesh cannot cut off .* set 0"),
        ("copris", "schedule.segment_tokens=63", "=63: .* from rollout.partial_save_tokens=64 to .*=512, or 0"),
        ("sync", "schedule.on_stale=restart", r"=restart with .*=sync: .* a preset with both \(rollpacker, sorted\)"),
        (
            "copris",
            "schedule.segment_tokens=64 generator.reload_every_versions=2",
            "segment_tokens=64 with generator.reload_every_versions=2: .* set generator.reload_every_versions=1",
        ),
        (
            "copris",
            "schedule.segment_tokens=64 schedule.pool_size=auto",
            "pool_size=auto with schedule.segment_tokens=64: .* set schedule.pool_size to a number or null",
        ),
        ("kimi", "schedule.segment_tokens=513", "segment_tokens=513: .* to .*=512, or 0"),
        ("ulorl", AGENT, "segment_tokens=null and rollout.program=agent: .* set schedule.segment_tokens=0"),
        (
            "sorted",
            "trainer.algorithm.advantage=grpo",
            r"advantage=grpo compares .* with schedule.harvest=trajectory \(schedule.preset=sorted\) a group has one; "
            "set trainer.algorithm.advantage=reinforce_pp, or schedule.harvest=group",
        ),
        ("sorted", f"schedule.filter_zero_variance=true {BATCH}", "=true would drop every group: .* set false"),
        (
            "copris",
            f"schedule.group_size=1 schedule.filter_zero_variance=true {BATCH}",
            "filter_zero_variance=true would drop every group: with schedule.group_size=1 .* or a larger",
        ),
        ("sorted", f"schedule.groups_per_batch=1 {BATCH}", "groups_per_batch=1 .* raise schedule.groups_per_batch"),
        ("sorted", f"{AGENT} {BATCH}", "=agent: the sessions of outside agents .* set schedule.harvest=group"),
        (
            "flexmarl",
            BATCH,
            "=4: trainer.algorithm.advantage=reinforce_pp is known only for the whole batch",
        ),
    ],
)
def test_settings_of_other_sections_that_contradict_the_schedule_are_refused(preset, settings, message):
    values = RUN.model_dump(mode="json")
    for item in f"schedule.preset={preset} {settings}".split(" "):
        path, _, text = item.partition("=")
        *sections, field = path.split(".")
        functools.reduce(lambda node, name: node[name], sections, values)[field] = yaml.safe_load(text)
    with pytest.raises(ConfigError, match=message):
        Schedule.from_config(RunConfig.model_validate(values))


def test_presets_in_parts_divide_a_batch_of_any_size():
    assert [schedule("flexmarl", groups_per_batch=size).part_groups for size in (16, 6, 5)] == [4, 3, 5]
    assert schedule("flexmarl", part_groups=0).part_groups == schedule("sync").part_groups == 0


@pytest.mark.parametrize("on_stale", ["evict", "mask_old_segments"])
def test_only_pace_bounds_the_window_by_the_staleness(on_stale):
    assert schedule("areal", groups_per_batch=4, window_groups=99, on_stale=on_stale).window_groups == 99


@pytest.mark.parametrize("preset", PRESETS)
def test_stage_end_needs_a_barrier_whatever_the_name_of_the_preset(preset):
    values = {**RUN.model_dump(mode="json"), "schedule": {"preset": preset, "part_groups": 0}}
    values["trainer"]["algorithm"] |= {"old_logprobs": "stage_end", "advantage": "reinforce_pp"}
    config = RunConfig.model_validate(values)
    if PRESETS[preset].barrier:
        assert Schedule.from_config(config).barrier
        return
    with pytest.raises(ConfigError, match=f"a barrier, which schedule.preset={preset} does not have; take copris"):
        Schedule.from_config(config)


def test_the_limits_of_the_queue_have_the_window_and_room_for_a_replacement_of_every_member():
    values = {**RUN.model_dump(mode="json"), "schedule": {"groups_per_batch": 4, "group_size": 8, "spare_members": 2}}
    limits = run_limits(RunConfig.model_validate(values))
    assert (limits.window_groups, limits.most_members) == (20, 20)


def test_trajectory_harvest_gives_every_answer_a_group_of_its_own_with_any_preset():
    resolved = schedule("copris", groups_per_batch=6, group_size=3, harvest="trajectory")
    assert (resolved.group_size, resolved.prompt_repeats, resolved.pool_size) == (1, 3, 9)
    assert schedule("sorted", harvest="group", group_size=3).group_size == 3
