"""Groups over the staleness bound begin again, at once or in a long round; B = 2 groups, n = 2 trajectories."""

import random
from dataclasses import replace

import pytest

from rollmesh.mesh import GroupView
from rollmesh.scheduling import OnStale, decide, needs_groups
from rollmesh.scheduling.presets import AdmissionRule

from .views import at_step, group, schedule, traced, view


def on_policy_waves(on_stale, **changes):
    """Return waves of one batch with a barrier, all of whose tokens have to be of the current policy."""
    rules = replace(schedule("copris_paper", max_staleness=0), admission=AdmissionRule.WAVE, on_stale=on_stale)
    return replace(rules, **changes)


def after_the_cut(**overrides):
    """Return the view right after batch 1 was cut: a ready and two open groups are left, one of them not begun."""
    values = {"cut_step": 1, "in_training": 2, "ready": [group(2, 0)], "opened": [group(3, 0), group(4, None)]}
    return view(**{**values, **overrides})


def test_groups_over_the_bound_begin_again_at_the_barrier_and_others_stay():
    seen = after_the_cut()
    restarts, sets_aside = (decide(on_policy_waves(rule), seen) for rule in (OnStale.RESTART, OnStale.SET_ASIDE))
    assert (restarts.restart, restarts.set_aside, restarts.evict) == (("e0-2", "e0-3"), (), ())
    assert (sets_aside.restart, sets_aside.set_aside, sets_aside.evict) == ((), ("e0-2", "e0-3"), ())
    assert restarts.desired.paused
    assert sets_aside.desired.paused


def test_a_leader_that_missed_the_barrier_lets_them_begin_again_after_it():
    seen = after_the_cut(trained_step=1, policy_version=1, policy_train_step=1, in_training=0)
    decisions = decide(on_policy_waves(OnStale.SET_ASIDE), seen)
    assert (decisions.set_aside, decisions.cut, decisions.desired.paused) == (("e0-2", "e0-3"), None, False)


@pytest.mark.parametrize("pause", ["recovering", "user_paused", "launcher_paused"])
def test_nothing_begins_again_while_the_mesh_recovers_or_is_paused(pause):
    seen = after_the_cut(**{pause: True})
    assert decide(on_policy_waves(OnStale.RESTART), seen).restart == ()
    assert not needs_groups(on_policy_waves(OnStale.RESTART), replace(seen, listed=False))


def test_the_barrier_needs_single_groups_only_for_groups_over_the_bound():
    rules, seen = on_policy_waves(OnStale.RESTART), replace(after_the_cut(), listed=False)
    assert needs_groups(rules, seen)
    assert not needs_groups(rules, replace(seen, unclaimed_by_step=()))
    assert not needs_groups(replace(rules, on_stale=OnStale.PACE), seen)
    with pytest.raises(ValueError, match="read it with its groups"):
        decide(rules, seen)


# aside, open, ready, recalled -> groups to recall, groups to admit
RECALLS = [
    (1, 0, 0, 0, 0, 2),  # fewer than a batch is aside: a short round
    (2, 0, 0, 0, 2, 0),  # a batch is aside: the long round brings B groups, and no new ones
    (3, 0, 0, 0, 2, 0),
    (2, 1, 0, 0, 0, 1),  # a round runs: it ends first
    (2, 0, 1, 0, 0, 1),
    (1, 2, 0, 2, 0, 0),  # the long round runs
    (1, 1, 0, 1, 2, 0),  # its leader died after the first group: the next one recalls the rest
    (0, 1, 0, 1, 0, 1),  # nothing is left to recall
    (2, 1, 0, 2, 0, 1),  # a recalled group was filtered: a new one takes its place
    (2, 0, 0, 2, 0, 2),  # all were
]


@pytest.mark.parametrize("row", RECALLS)
def test_a_long_round_begins_when_a_batch_is_aside_and_nothing_is_open(row):
    aside, opened, ready, recalled, recalls, admits = row
    seen = view(
        opened=[group(10 + i, 0) for i in range(opened)],
        ready=[group(20 + i, 0) for i in range(ready)],
        aside_groups=aside,
        recalled_groups=recalled,
    )
    decisions = decide(on_policy_waves(OnStale.SET_ASIDE), seen)
    assert (decisions.recall, decisions.admit_groups) == (recalls, admits)


def test_no_group_of_a_wave_of_several_batches_opens_beside_a_long_round():
    waves = schedule("sorted", on_stale="set_aside")
    recalled = {"opened": [group(100, None), group(101, None)], "recalled_groups": 2, "aside_groups": 4}
    assert waves.wave_batches == 4
    assert decide(waves, at_step(1, **recalled)).admit_groups == 0
    filtered = {**recalled, "opened": recalled["opened"][:1]}
    assert decide(waves, at_step(1, **filtered)).admit_groups == 1, "in place of one that was dropped"


def test_recalled_groups_start_on_the_current_policy():
    seen = at_step(3, aside_groups=2, aside=("e0-1", "e0-2"))
    decisions = decide(on_policy_waves(OnStale.SET_ASIDE), seen)
    assert (decisions.recall, decisions.desired.start_at_version) == (2, 3)


def test_the_end_of_the_run_accounts_for_groups_that_are_aside():
    rules = on_policy_waves(OnStale.SET_ASIDE, train_steps=1)
    seen = view(cut_step=1, in_training=2, aside_groups=1, aside=("e0-7",))
    assert needs_groups(rules, replace(seen, listed=False, aside=()))
    decisions = decide(rules, seen)
    assert [(e.group_id, e.reason) for e in decisions.evict] == [("e0-7", "run_complete")]
    assert decisions.recall == 0


# trained, cut, policy, open, ready, aside, recalled -> groups to admit, to set aside, to recall; cut
LONG_ROUND = [
    (1, 1, 1, 0, 0, 1, 0, 3, 0, 0, False),  # one prompt is in the long queue, fewer than P0: a short round of 1.25 * P0
    (1, 1, 1, 1, 2, 1, 0, 0, 0, 0, True),  # the first P0 prompts are done
    (1, 2, 1, 1, 0, 1, 0, 0, 1, 0, False),  # the third one is aborted and joins the long queue
    (2, 2, 1, 0, 0, 2, 0, 0, 0, 0, False),  # trained, not announced
    (2, 2, 2, 0, 0, 2, 0, 0, 0, 2, False),  # P0 prompts wait: a long round of exactly P0 prompts
    (2, 2, 2, 2, 0, 0, 2, 0, 0, 0, False),  # no spare prompts beside it
    (2, 2, 2, 0, 2, 0, 2, 0, 0, 0, True),
    (2, 3, 2, 0, 0, 0, 0, 0, 0, 0, False),  # every prompt of the long round is in the batch
    (3, 3, 3, 0, 0, 0, 0, 3, 0, 0, False),  # short again
]


@pytest.mark.parametrize("row", LONG_ROUND)
def test_rollpacker_trains_its_late_prompts_in_a_long_round(row):
    *seen, aside, recalled, admit, set_aside, recall, cuts = row
    decisions = decide(schedule("rollpacker"), traced(*seen, aside_groups=aside, recalled_groups=recalled))
    assert (decisions.admit_groups, len(decisions.set_aside), decisions.recall) == (admit, set_aside, recall)
    assert (decisions.cut is not None) == cuts
    assert not decisions.evict


def test_groups_without_tokens_neither_begin_again_nor_postpone_the_long_round():
    rules = on_policy_waves(OnStale.SET_ASIDE)
    assert decide(rules, at_step(1, opened=[group(4, None)], aside_groups=2)).recall == 2
    missed = decide(rules, at_step(1, opened=[group(3, 0)], aside_groups=1))
    assert (missed.set_aside, missed.admit_groups) == (("e0-3",), 0)


def test_rollpacker_without_setting_aside_has_no_spare_groups():
    rules = schedule("rollpacker", groups_per_batch=8, on_stale="pace")
    assert (rules.window_groups, rules.spare_groups) == (8, 0)


@pytest.mark.parametrize(
    ("order", "expected"),
    [("admission", ("e0-1", "e0-2")), ("shortest", ("e0-4", "e0-2")), ("oldest", ("e0-3", "e0-1"))],
)
def test_groups_that_no_later_batch_needs_leave_in_the_cut_order(order: str, expected: tuple[str, ...]) -> None:
    ready = [group(1, 2, tokens=90), group(2, 3, tokens=40), group(3, 1, tokens=70), group(4, 3, tokens=10)]
    assert decide(schedule(max_staleness=4, cut_order=order), at_step(3, ready=ready)).cut == expected


def test_a_group_that_is_due_goes_before_shorter_ones_and_blocks_their_cut_while_it_is_open() -> None:
    """Staleness 2 at step 3: tokens of train step 1 can be trained in this batch only."""
    rules, short = schedule(max_staleness=2, cut_order="shortest"), [group(1, 3, tokens=5), group(2, 3, tokens=4)]
    assert decide(rules, at_step(3, ready=[*short, group(7, 1, tokens=900)])).cut == ("e0-7", "e0-2")
    assert decide(rules, at_step(3, ready=short, opened=[group(7, 1)])).blocked_by


@pytest.mark.parametrize("order", ["shortest", "oldest"])
def test_equal_groups_leave_in_admission_order(order: str) -> None:
    ready = [group(index, 3, tokens=8) for index in (4, 9, 6)]
    assert decide(schedule(max_staleness=4, cut_order=order), at_step(3, ready=ready)).cut == ("e0-4", "e0-6")


def test_a_group_without_tokens_is_the_newest() -> None:
    ready = [group(1, None), group(2, 3), group(3, 2)]
    assert decide(schedule(max_staleness=4, cut_order="oldest"), at_step(3, ready=ready)).cut == ("e0-3", "e0-2")


@pytest.mark.parametrize("seed", range(20))
def test_no_order_lets_a_group_pass_the_bound(seed: int) -> None:
    """One long group among ready ones that are always shorter and younger leaves within max_staleness + 1 batches."""
    random_ = random.Random(seed)
    rules = schedule(max_staleness=3, cut_order="shortest")
    long, index = group(0, 0, tokens=10_000), 1
    ready: list[GroupView] = [long]
    for step in range(4):
        while len(ready) < 4:
            ready.append(group(index, step, tokens=random_.randrange(1, 100)))
            index += 1
        cut = decide(rules, at_step(step, ready=ready)).cut
        if long.group_id in cut:
            return
        ready = [g for g in ready if g.group_id not in cut]
    pytest.fail("the long group was overtaken beyond its last batch")
