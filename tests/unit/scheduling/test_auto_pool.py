"""The automatic pool: two bounds, each from measured numbers, and a memory that is in the view only."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.mesh import CachePool, Desired, EngineLoad
from rollmesh.scheduling import decide
from rollmesh.scheduling.auto_pool import cache_pool, mean_cached_tokens, pool_size, trainer_groups, trainer_pool

from .views import group, schedule, view

B, N = 16, 8
AUTO = schedule(groups_per_batch=B, group_size=N, max_staleness=4, pool_size="auto")
IDLE = EngineLoad(slots=256, waiting=0, kv_token_capacity=100_000, preemptions=0)
SETTLED = 10.0
STEP = 2 * N
"""An eighth of a batch of 16 groups, in trajectories."""


def seen(ready_seconds=None, update_seconds=None, pool=None, finished_lengths=None, **overrides):
    desired = Desired(pool_size=1, cache_pool=pool)
    measured = None if ready_seconds is None or not update_seconds else ready_seconds // update_seconds
    times = {"ready_seconds": ready_seconds, "update_seconds": update_seconds, "ready_updates": measured}
    running = mean_cached_tokens(finished_lengths or {})
    return view(**{**times, **overrides}, desired=desired, mean_cached_tokens=running)


def after(pool, engines, now=1000.0 + SETTLED, **overrides):
    """The bound by the caches that follows ``pool``, which was set at 1000 s without a preemption."""
    before = CachePool(size=pool, since=1000.0, preemptions=0)
    return cache_pool(AUTO, seen(pool=before, engines=engines, now=now, **overrides))


def test_littles_law_by_hand():
    """16 in the trainer, 16 for its next batch, 16 * 0.125 an update late, a margin of 16 * 4.5 / (4 * 6) + 4 / 2."""
    look = seen(4.5, 6.0, ready_updates=0.125)
    assert trainer_groups(AUTO, look) == 16 + 16 + 2 + 3 + 2
    assert pool_size(AUTO, look) == (39 - 16) * 8


def test_slow_generation_has_the_pool_of_the_preset_and_the_whole_window():
    look = seen(60.0, 6.0)
    assert trainer_groups(AUTO, look) == AUTO.window_groups == 5 * B
    assert pool_size(AUTO, look) == AUTO.pool_size == 1.5 * B * N


def test_the_pool_of_copris_is_automatic_unless_it_has_a_number_or_trajectories_rest():
    assert schedule(groups_per_batch=B, group_size=N, pool_size=None).auto_pool
    assert not schedule(groups_per_batch=B, group_size=N, pool_size=192).auto_pool
    resting = schedule(groups_per_batch=B, group_size=N, pool_size=None, segment_tokens=128)
    assert (resting.auto_pool, resting.pool_size) == (False, 192)
    assert not schedule("dart", groups_per_batch=B, group_size=N, pool_size=None).auto_pool


def test_groups_that_are_ready_within_an_update_get_a_margin_only():
    assert trainer_groups(AUTO, seen(0.0, 6.0)) == 16 + 16 + 2
    assert trainer_groups(AUTO, seen(4.5, 6.0)) == 16 + 16 + 3 + 2


TIMES = st.none() | st.floats(0, 1e9)


@given(TIMES, TIMES, st.integers(1, 40), st.integers(0, 5))
def test_the_trainer_gets_at_least_two_batches_within_the_window(ready, update, batch, staleness):
    auto = schedule(groups_per_batch=batch, max_staleness=staleness, pool_size="auto")
    groups = trainer_groups(auto, seen(ready, update))
    assert min(2 * batch, auto.window_groups) <= groups <= auto.window_groups
    assert batch * auto.group_size <= pool_size(auto, seen(ready, update)) <= auto.pool_size


@given(st.floats(0.1, 100), st.floats(0.1, 100), st.floats(1, 10))
def test_a_longer_time_to_ready_never_lowers_the_pool_and_a_slower_trainer_never_raises_it(ready, update, factor):
    pool = pool_size(AUTO, seen(ready, update))
    assert pool_size(AUTO, seen(ready * factor, update)) >= pool >= pool_size(AUTO, seen(ready, update * factor))


ENGINES = st.builds(
    EngineLoad,
    slots=st.integers(1, 1000),
    waiting=st.integers(0, 1000),
    kv_token_capacity=st.integers(1, 1 << 20),
    preemptions=st.integers(0, 100),
)
POOLS = st.none() | st.builds(
    CachePool, size=st.integers(1, 5000), since=st.floats(0, 2000), preemptions=st.integers(0, 100)
)
LENGTHS = st.dictionaries(st.integers(0, 60), st.integers(1, 1000))


@given(ENGINES, POOLS, LENGTHS, TIMES, TIMES)
def test_the_pool_is_never_above_either_bound_nor_below_one_group(engines, before, lengths, ready, update):
    look = seen(ready, update, before, engines=engines, finished_lengths=lengths)
    pool, by_caches = pool_size(AUTO, look), cache_pool(AUTO, look)
    assert pool <= max(N, min(trainer_pool(AUTO, look), by_caches.size))
    held = pool * ((look.mean_cached_tokens or AUTO.longest_trajectory_tokens / 2) + 1)
    assert held <= 0.9 * engines.kv_token_capacity or pool == N
    assert pool >= N


@given(ENGINES, POOLS, LENGTHS)
def test_preemptions_never_give_a_larger_bound(engines, before, lengths):
    calm = replace(engines, preemptions=before.preemptions if before else 0)
    preempted = replace(calm, preemptions=calm.preemptions + 1)
    bounds = [cache_pool(AUTO, seen(pool=before, engines=e, finished_lengths=lengths)) for e in (preempted, calm)]
    assert bounds[0].size <= bounds[1].size


def test_caches_hold_the_prompt_and_the_mean_length_so_far_of_each_trajectory():
    """All lengths in bucket 28, 127 to 151 tokens, middle 138.6: 69.3 of them so far, 10 of the prompt, one to come."""
    look = seen(engines=IDLE, finished_lengths={28: 5}, mean_prompt_bytes=40.0)
    assert look.mean_cached_tokens == pytest.approx(138.6 / 2, abs=0.1)
    assert cache_pool(AUTO, look).size == int(0.9 * 100_000 / (69.3 + 10 + 1))


def test_long_answers_count_more_than_their_share_because_they_run_longer():
    short, mixed = ({16: 90}, {16: 90, 36: 10})
    assert mean_cached_tokens(mixed) > 20 * mean_cached_tokens(short)


@pytest.mark.parametrize(
    ("engines", "expected"),
    [
        (IDLE, 400 + STEP),
        (replace(IDLE, preemptions=20), 400 + STEP),  # a twentieth of 400
        (replace(IDLE, preemptions=21), 300),
        (replace(IDLE, waiting=65), 320),  # 1.25 * 256 slots: fewer would leave slots idle
        (replace(IDLE, waiting=64), 400 + STEP),
        (replace(IDLE, waiting=65, slots=16), 300),
    ],
)
def test_a_settled_bound_falls_by_a_quarter_on_trouble_and_rises_by_an_eighth_of_a_batch_without(engines, expected):
    assert after(400, engines, finished_lengths={28: 5}) == CachePool(
        size=expected, since=1010.0, preemptions=engines.preemptions
    )


def test_nothing_changes_before_the_last_change_has_shown_and_a_clock_set_back_does_not_stop_it():
    trouble = replace(IDLE, preemptions=21)
    assert after(400, trouble, now=1009.9, finished_lengths={28: 5}).size == 400
    assert after(400, trouble, now=900.0, finished_lengths={28: 5}) == CachePool(size=300, since=900.0, preemptions=21)


def test_the_bound_recovers_from_its_floor_once_preemptions_end():
    look = seen(engines=IDLE, finished_lengths={28: 5}, pool=CachePool(size=2000, since=0.0, preemptions=0))
    preemptions = 0
    for at in range(100):
        preemptions += 2000
        look = next_look(look, at, replace(IDLE, preemptions=preemptions))
    assert look.desired.cache_pool.size == N
    for at in range(100, 120):
        look = next_look(look, at, replace(IDLE, preemptions=preemptions))
    # The last preemption was seen at the next look, so 19 of the 20 raised it.
    assert look.desired.cache_pool.size == N + 19 * STEP


def next_look(look, at, engines):
    """The view ten seconds after ``decide`` wrote its desired state: all that a new leader knows."""
    desired = decide(AUTO, look).desired
    return replace(look, now=1010.0 + 10 * at, desired=desired, engines=engines)


def test_a_generator_that_restarts_with_fewer_preemptions_does_not_hide_new_ones():
    look = seen(engines=IDLE, finished_lengths={28: 5}, pool=CachePool(size=400, since=0.0, preemptions=50))
    look = next_look(look, 0, replace(IDLE, preemptions=22))
    assert look.desired.cache_pool == CachePool(size=400 + STEP, since=1000.0, preemptions=0)
    assert cache_pool(AUTO, look).size == 312


def test_the_bound_stays_while_no_generator_serves():
    before = CachePool(size=24, since=0.0, preemptions=0)
    look = seen(1.0, 1.0, before, engines=None)
    assert (cache_pool(AUTO, look), pool_size(AUTO, look)) == (before, 24)


def test_ready_groups_and_the_batch_in_the_trainer_take_the_place_of_new_ones():
    """The trainer can consume 35 groups in time: 16 are in it and 10 are ready."""
    ready = [group(index) for index in range(10)]
    look = seen(1.0, 8.0, ready=ready, in_training=16, cut_step=1)
    assert decide(AUTO, look).admit_groups == 35 - 26
    assert decide(AUTO, replace(look, admitted_unconsumed=35)).admit_groups == 0


def test_groups_wait_for_the_policy_of_the_last_update():
    """The trainer has reported step 1 and not announced its policy: groups that start now would be one step older."""
    ready = [group(index) for index in range(3)]
    look = seen(1.0, 8.0, ready=ready, in_training=16, cut_step=2, trained_step=1, policy_train_step=0)
    assert decide(AUTO, look).admit_groups == 0
    assert decide(AUTO, replace(look, policy_train_step=1, policy_version=1)).admit_groups == 16
