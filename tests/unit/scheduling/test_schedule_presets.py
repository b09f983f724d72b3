import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import AdmissionRule, OnStale, Schedule, run_limits
from rollmesh.scheduling.presets import PRESETS

from ...kit.run_files import run_config
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


def test_an_odd_batch_rounds_the_copris_pool_up_to_whole_groups():
    assert schedule(groups_per_batch=3, group_size=4).pool_size == 5 * 4


def test_the_default_pool_shrinks_to_a_tight_staleness_bound():
    assert schedule(groups_per_batch=4, max_staleness=0).pool_size == 8


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


def schedule_of(words: str) -> Schedule:
    """Resolve a preset with further fields, of the schedule unless they name another section."""
    preset, *items = words.split()
    fields = (item if "." in item.partition("=")[0] else f"schedule.{item}" for item in items)
    return Schedule.from_config(run_config(f"schedule.preset={preset} {' '.join(fields)}"))


FOUR = "groups_per_batch=4"
AGENT = "rollout.program=agent evaluation.before_and_after=false evaluation.every_versions=0"
BATCH = "trainer.algorithm.advantage=reinforce_pp"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (f"copris {FOUR} window_groups=3", "=3 is below schedule.groups_per_batch=4.*raise it to at least 4"),
        (f"copris {FOUR} window_groups=21", r"=21 is above .*= \(4 \+ 1\) \* 4 = 20.*set at most 20"),
        (f"copris {FOUR} spare_groups=1", "=1: schedule.preset=copris opens no waves.*april, flexmarl, kimi, one_step"),
        ("areal wave_batches=2", "wave_batches=2: schedule.preset=areal opens no waves"),
        (f"sync {FOUR} wave_batches=2", r"= 2 \* 4 \+ 0 = 8 is above the window of 4 groups.* lower wave_batches;"),
        (f"april {FOUR} window_groups=7 spare_groups=4", r"= 1 \* 4 \+ 4 = 8 is above the window of 7 groups"),
        ("sync spare_groups=1", "lower spare_groups; schedule.preset=sync opens no more groups at once$"),
        (f"sync {FOUR} pool_size=99", "lower pool_size; schedule.preset=sync opens no more groups at once$"),
        (f"sync {FOUR} window_groups=5", "set at most 4, or take another on_stale$"),
        (f"one_step_off {FOUR} window_groups=7 spare_groups=4", "lower spare_groups, or raise window_groups$"),
        (f"rollpacker {FOUR} spare_groups=4", "lower spare_groups, or raise window_groups$"),
        (f"april {FOUR} window_groups=4 spare_groups=1", "or raise window_groups or max_staleness$"),
        (
            f"copris {FOUR} group_size=2 spare_members=1 pool_size=61",
            r"pool_size=61 is above .* = 20 \* \(2 \+ 1\) = 60",
        ),
        (f"copris {FOUR} group_size=2 max_staleness=2 pool_size=25", "pool_size=25 .* = 24: with .*max_staleness=2"),
        (f"sorted {BATCH} {FOUR} pool_size=999", r"\(members of a group \+ spare_members\) = .* \* \(1 \+ 0\)"),
        ("sync max_staleness=3", "is max_staleness=0 by definition"),
        ("one_step_off max_staleness=3", "is max_staleness=1 by definition"),
        ("sync generator.reload_every_versions=2", "=2: .*max_staleness=0 .*no effect; lower it$"),
        ("copris generator.reload_every_versions=6", "=6: .*max_staleness=4 .*lower it or raise max_staleness$"),
        ("copris_paper generator.reload_every_versions=2", "=2: .*with its barrier .*lower it$"),
        *((f"{name} pool_size=auto", f"auto: .*preset={name} .* take copris, areal,") for name in ("sync", "april")),
        ("copris_paper pool_size=auto", "auto: schedule.preset=copris_paper .* take copris, areal,"),
        ("copris part_groups=4", "schedule.part_groups=4: schedule.preset=copris .* take a preset"),
        ("sync part_groups=5", "=5 does not divide schedule.groups_per_batch=16"),
        ("flexmarl trainer.minibatches=2", "=4 accumulates .* set trainer.minibatches=1 or part_groups=0"),
        (
            "flexmarl model.adapter.dropout=0.1 generator.on_new_version=next_slice",
            "part_groups=4 with model.adapter.dropout=0.1: .* set model.adapter.dropout=0 or part_groups=0",
        ),
        ("april part_groups=4", "april may cut other groups.*without spare groups"),
        ("streamrl checkpoints.state_every_steps=2", "part_groups=2 with .*state_every_steps=1 or part_groups=0"),
        ("april on_stale=set_aside", "on_stale=set_aside with max_staleness=5.*set max_staleness=0"),
        ("rollpacker on_stale=restart", "on_stale=restart with spare_groups=4.*set spare_groups=0"),
        (f"rollpacker {AGENT}", "spare_members=2: with rollout.program=agent the mesh cannot cut off .* set 0"),
        ("copris segment_tokens=63", "=63: .* from rollout.partial_save_tokens=64 to .*=512, or 0"),
        ("sync on_stale=restart", r"=restart with .*=sync: .* a preset with both \(rollpacker, sorted\)"),
        ("copris_paper on_stale=set_aside", "on_stale=set_aside with schedule.preset=copris_paper.*set on_stale"),
        (
            "copris segment_tokens=64 generator.reload_every_versions=2",
            "segment_tokens=64 with generator.reload_every_versions=2: .* set generator.reload_every_versions=1",
        ),
        ("copris segment_tokens=64 pool_size=auto", "auto with .*=64: .* set schedule.pool_size to a number or null"),
        ("copris cut_order=shortest on_stale=mask_old_segments", "shortest with schedule.on_stale=mask_old_segments"),
        ("kimi segment_tokens=513", "segment_tokens=513: .* to .*=512, or 0"),
        (f"ulorl {AGENT}", "segment_tokens=null and rollout.program=agent: .* set schedule.segment_tokens=0"),
        (
            "sorted trainer.algorithm.advantage=grpo",
            r"advantage=grpo compares .* with schedule.harvest=trajectory \(schedule.preset=sorted\) a group has one; "
            "set trainer.algorithm.advantage=reinforce_pp, or schedule.harvest=group",
        ),
        (f"sorted filter_zero_variance=true {BATCH}", "=true would drop every group: .* set false"),
        (
            f"copris group_size=1 filter_zero_variance=true {BATCH}",
            "every group: with .*group_size=1 .* or a larger",
        ),
        (f"sorted groups_per_batch=1 {BATCH}", "groups_per_batch=1 .* raise schedule.groups_per_batch"),
        (f"sorted {AGENT} {BATCH}", "=agent: the sessions of outside agents .* set schedule.harvest=group"),
        (f"flexmarl {BATCH}", "=4: trainer.algorithm.advantage=reinforce_pp is known only for the whole batch"),
    ],
)
def test_settings_that_contradict_the_schedule_are_refused_with_the_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        schedule_of(words)


@pytest.mark.parametrize("words", ["sync part_groups=4", "one_step_off generator.reload_every_versions=2"])
def test_settings_within_the_bounds_of_the_schedule_are_accepted(words):
    assert schedule_of(words).preset == words.split()[0]


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
