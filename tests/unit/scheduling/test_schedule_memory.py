"""Groups that the store has room for."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.config import RunConfig
from rollmesh.config.teachers import TeacherConfig
from rollmesh.errors import ConfigError
from rollmesh.scheduling import Schedule, decide
from rollmesh.scheduling.admission import groups_to_admit, trajectory_bytes
from rollmesh.scheduling.resolved_schedule import BYTES_PER_TOKEN

from .views import RUN, group, schedule, view

GIB = 1 << 30
LONG = replace(schedule(groups_per_batch=64, group_size=16), longest_trajectory_tokens=65_536)
FULL = 65_536 * (8 + 90 / 64) + 1500


def test_the_first_wave_is_admitted_only_as_far_as_the_store_can_hold_it_at_full_length() -> None:
    """1.5 batches of 64 groups and one more fill the pool, but 1 GiB holds 86 groups of 16 answers of 64k tokens."""
    admitted = decide(LONG, view(max_memory_bytes=GIB)).admit_groups
    assert admitted == int(0.8 * GIB / (16 * FULL)) == 86
    assert decide(LONG, view(max_memory_bytes=8 * GIB)).admit_groups == 160
    assert decide(LONG, view(max_memory_bytes=0)).admit_groups == 160, "a store without a limit"


def test_the_scores_of_a_teacher_take_room_before_and_after_the_last_token() -> None:
    """Each token has 4 bytes for its own score and 8 for each of the 8 most likely ones."""
    taught = RUN.model_copy(
        update={"teachers": {"a": TeacherConfig(model="a"), "b": TeacherConfig(model="b", top_k=8)}}
    )
    resolved = Schedule.from_config(taught)
    assert (Schedule.from_config(RUN).bytes_per_token, resolved.bytes_per_token) == (8, 8 + 4 + 8 * 8)
    rules = replace(LONG, bytes_per_token=resolved.bytes_per_token)
    full = 65_536 * (76 + 90 / 64) + 1500
    admitted = decide(rules, view(max_memory_bytes=8 * GIB)).admit_groups
    assert admitted == int(0.8 * 8 * GIB / (16 * full)) == 84
    waiting = decide(rules, view(max_memory_bytes=8 * GIB, finished=256)).admit_groups
    assert waiting == int((0.8 * 8 * GIB - 256 * 65_536 * 68) / (16 * full)) == 70


def test_the_first_short_answers_do_not_speak_for_those_that_are_still_written() -> None:
    """16 of 1,376 rollouts have ended after 100 tokens each."""
    opened = [group(index) for index in range(86)]
    seen = view(
        opened=opened,
        unfinished=86 * 16 - 16,
        max_memory_bytes=GIB,
        used_memory_bytes=2_000_000,
        saved_bytes_total=16 * 800,
        finished_total=16,
    )
    assert decide(LONG, seen).admit_groups == 3, "the pool would have 75"
    count, reason = groups_to_admit(LONG, replace(seen, used_memory_bytes=40_000_000))
    assert (count, reason) == (0, "memory of the store: trajectories in flight may take the rest")


def test_answers_that_turned_out_short_make_room() -> None:
    seen = view(
        max_memory_bytes=GIB, used_memory_bytes=2_000_000, saved_bytes_total=20_000 * 800, finished_total=20_000
    )
    assert decide(LONG, seen).admit_groups == 160


def test_long_prompts_of_the_groups_to_come_take_room() -> None:
    admitted = decide(LONG, view(max_memory_bytes=GIB, mean_prompt_bytes=1e6)).admit_groups
    assert admitted == int(0.8 * GIB / (16 * FULL + 1e6)) == 78


def test_what_the_next_batch_lacks_is_admitted_however_long_it_may_get() -> None:
    few = [group(index) for index in range(60)]
    seen = view(opened=few, unfinished=60 * 16, max_memory_bytes=GIB // 8, used_memory_bytes=1 << 20)
    assert decide(LONG, seen).admit_groups == 4
    full = replace(seen, memory_ratio=0.8)
    assert decide(LONG, full).admit_groups == 0, "unless there is no memory left at all"


@settings(max_examples=100)
@given(
    max_memory=st.integers(1 << 20, 1 << 34),
    finished=st.integers(0, 10_000),
    mean_bytes=st.integers(0, 65_536 * BYTES_PER_TOKEN),
    opened=st.integers(0, 300),
    ready=st.integers(0, 64),
)
@pytest.mark.parametrize("preset", ["copris", "areal", "sync"])
def test_a_batch_can_always_be_completed_and_the_limit_is_passed_for_nothing_else(
    preset: str, max_memory: int, finished: int, mean_bytes: int, opened: int, ready: int
) -> None:
    rules = replace(schedule(preset, groups_per_batch=64, group_size=16), longest_trajectory_tokens=65_536)
    seen = view(
        opened=[group(index) for index in range(opened)],
        ready=[group(1000 + index) for index in range(ready)],
        unfinished=opened * 16,
        max_memory_bytes=max_memory,
        saved_bytes_total=finished * mean_bytes,
        finished_total=finished,
    )
    bounded, unbounded = decide(rules, seen).admit_groups, decide(rules, replace(seen, max_memory_bytes=0)).admit_groups
    lacking = max(0, 64 - opened - ready)
    assert min(lacking, unbounded) <= bounded <= unbounded
    if bounded > lacking:
        tokens = (1024 * 65_536 + finished * mean_bytes / BYTES_PER_TOKEN) / (1024 + finished)
        each = trajectory_bytes(tokens, rules)
        assert (opened * 16 + bounded * 16) * each <= 0.8 * max_memory


def planned(planner: str, **changes: object) -> Schedule:
    values = {
        **RUN.model_dump(mode="json"),
        "schedule": {"groups_per_batch": 64, "group_size": 16, **changes},
        "trainer": {"algorithm": {"advantage": "dr_grpo"}},
        "curriculum": {"planner": planner},
    }
    return replace(Schedule.from_config(RunConfig.model_validate(values)), longest_trajectory_tokens=65_536)


def test_members_beyond_the_group_size_take_room_from_the_first_round_on() -> None:
    rules = planned("spare")
    assert (rules.launched_members, rules.most_members) == (17, 17)
    assert decide(rules, view(max_memory_bytes=GIB)).admit_groups == int(0.8 * GIB / (17 * FULL)) == 81


def test_a_later_round_has_room_before_its_group_is_admitted() -> None:
    """dars launches 16 members, and up to 32 in all."""
    rules = planned("dars")
    assert (rules.launched_members, rules.most_members) == (16, 32)
    assert decide(rules, view(max_memory_bytes=GIB)).admit_groups == 64, "the batch is admitted in any case"
    assert decide(rules, view(max_memory_bytes=2 * GIB)).admit_groups == int(0.8 * 2 * GIB / (32 * FULL)) == 86


def test_members_that_open_groups_may_still_get_keep_their_room() -> None:
    """80 open groups whose 16 members have all ended, but may get 16 more each, which fill 8 / 10 of 2 GiB with 86."""
    opened = [group(index) for index in range(80)]
    seen = view(opened=opened, unfinished=0, max_memory_bytes=2 * GIB)
    left = int((0.8 * 2 * GIB - 80 * 16 * FULL) / (32 * FULL))
    assert decide(planned("dars"), seen).admit_groups == left == 46
    assert decide(planned("single"), seen).admit_groups > left


def test_running_members_of_later_rounds_keep_no_more_room_than_their_groups_may_fill() -> None:
    """60 open groups have 32 members each, and get no other one; 20 of each run."""
    opened = [group(index) for index in range(60)]
    seen = view(opened=opened, unfinished=60 * 20, max_memory_bytes=3 * GIB)
    left = int((0.8 * 3 * GIB - 60 * 32 * FULL) / (32 * FULL))
    assert decide(planned("dars", pool_size=96 * 16), seen).admit_groups == left == 70


def test_forks_beyond_the_members_of_their_groups_keep_their_room() -> None:
    """60 open groups of 16 members have forked to 20 running ones each."""
    opened = [group(index) for index in range(60)]
    seen = view(opened=opened, unfinished=60 * 20, max_memory_bytes=GIB)
    left = int((0.8 * GIB - 60 * 20 * FULL) / (16 * FULL))
    assert decide(planned("single"), seen).admit_groups == left == 11


def test_the_pool_of_a_planner_counts_the_members_that_it_launches() -> None:
    """The default pool is 1.5 batches of groups in their first round."""
    assert planned("single").pool_size == 96 * 16
    assert planned("spare").pool_size == 96 * 17
    assert planned("dars").pool_size == 96 * 16
    assert planned("spare").pool_groups == 96


def test_a_fixed_pool_may_hold_the_later_rounds_of_all_groups_and_no_more() -> None:
    most = planned("dars").window_groups * 32
    assert planned("dars", pool_size=most).pool_size == most
    with pytest.raises(ConfigError, match=r"is above window_groups \* \(members of a group .*\(32 \+ 0\)"):
        planned("dars", pool_size=most + 1)


def test_an_automatic_pool_has_room_for_the_first_round_of_a_group() -> None:
    """A batch is in the trainer and one on its way: 64 groups of 17, and 4 for chance."""
    rules = planned("spare", pool_size="auto")
    assert decide(rules, view(max_memory_bytes=0)).desired.pool_size == (64 + 4) * 17
