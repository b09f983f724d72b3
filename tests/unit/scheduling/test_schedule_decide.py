from dataclasses import replace

import pytest

from rollmesh.mesh import Eviction
from rollmesh.scheduling import decide, needs_groups
from rollmesh.scheduling.cutting import blocking_groups, plan_cut

from .views import at_step, group, schedule, view


def test_pace_waits_for_an_open_group_that_the_step_after_could_not_train():
    ready = [group(5, 3), group(6, 3)]
    waits = decide(schedule(max_staleness=2), at_step(3, ready=ready, opened=[group(1, 1)]))
    assert waits.cut is None
    assert waits.blocked_by
    assert "train step 1 or older" in waits.desired.waiting_for
    goes = decide(schedule(max_staleness=2), at_step(3, ready=ready, opened=[group(1, 2)]))
    assert goes.cut == ("e0-5", "e0-6")
    assert not goes.blocked_by


def test_pace_waits_before_more_stragglers_fall_due_at_once_than_a_batch_can_hold():
    """B = 1, staleness 2: groups 0 and 1 both have tokens of step 0, so one of them must leave in batch 2."""
    one = schedule("areal", groups_per_batch=1, group_size=2, max_staleness=2, pool_size=6)
    stragglers = [group(0, 0), group(1, 0)]
    blocked = decide(one, at_step(1, ready=[group(3, 1)], opened=stragglers))
    assert blocked.cut is None
    assert blocked.blocked_by
    freed = decide(one, at_step(1, ready=[group(3, 1), group(1, 0)], opened=stragglers[:1]))
    assert freed.cut == ("e0-1",)


def test_ready_groups_that_fall_due_leave_first_and_the_others_in_admission_order():
    ready = [group(1, 3), group(2, 3), group(7, 1)]
    assert decide(schedule(max_staleness=2), at_step(3, ready=ready)).cut == ("e0-7", "e0-1")
    assert decide(schedule(max_staleness=4), at_step(3, ready=ready)).cut == ("e0-1", "e0-2")


def blocked_for(seconds, rules, seen):
    """The same mesh once the leader has stored what blocks the cut, so many seconds later."""
    return replace(seen, blocked_by=decide(rules, seen).blocked_by, blocked_since=seen.now - seconds)


def test_only_the_blocking_stragglers_are_evicted_and_only_after_the_timeout():
    limited = schedule(max_staleness=2, straggler_timeout_seconds=60)
    groups = {"ready": [group(5, 3), group(6, 3)], "opened": [group(1, 1), group(2, 2), group(3, None)]}
    assert decide(limited, blocked_for(59, limited, at_step(3, **groups))).evict == ()
    late = decide(limited, blocked_for(60, limited, at_step(3, **groups)))
    assert late.evict == (Eviction(group_id="e0-1", reason="straggler_timeout"),)
    assert late.cut is None
    assert decide(limited, at_step(3, ready=groups["ready"], opened=groups["opened"][1:])).cut == ("e0-5", "e0-6")


def test_the_straggler_timeout_restarts_when_other_groups_block_the_cut():
    limited = schedule(max_staleness=2, straggler_timeout_seconds=60)
    ready = [group(5, 3), group(6, 3)]
    before = blocked_for(600, limited, at_step(3, ready=ready, opened=[group(1, 1)]))
    after = at_step(3, ready=ready, opened=[group(2, 1)], blocked_by=before.blocked_by, blocked_since=400.0)
    assert decide(limited, before).evict
    assert decide(limited, after).blocked_by
    assert decide(limited, after).blocked_by != before.blocked_by
    assert decide(limited, after).evict == ()


@pytest.mark.parametrize("preset", ["sync", "one_step_off", "copris", "copris_paper", "areal"])
def test_the_straggler_timeout_fires_with_fewer_than_a_batch_of_ready_groups(preset):
    """All groups that may be open are; one rollout is left in progress."""
    limited = schedule(preset, straggler_timeout_seconds=60)
    opened = [group(0), *(group(2 + index) for index in range(limited.window_groups - 2))]
    seen = view(ready=[group(1)], opened=opened, unfinished=1)
    assert decide(limited, seen).admit_groups == 0
    assert decide(limited, blocked_for(59, limited, seen)).evict == ()
    late = decide(limited, blocked_for(60, limited, seen))
    assert late.evict == (Eviction(group_id="e0-0", reason="straggler_timeout"),)


def test_the_straggler_timeout_restarts_with_every_rollout_that_ends():
    limited = schedule("sync", straggler_timeout_seconds=60)
    seen = blocked_for(600, limited, view(ready=[group(1)], opened=[group(0)], unfinished=1))
    assert decide(limited, seen).evict
    for change in ({"leased": 2}, {"finished_total": 1}, {"open_groups": 2, "admitted_unconsumed": 3}):
        other = decide(limited, replace(seen, **change))
        assert other.blocked_by and not other.evict, change


@pytest.mark.parametrize(
    "healthy",
    [{"leased": 4}, {"pending": 1}, {"partial": 1}, {"finished": 1}, {"registered_generators": 0}, {"cut_step": 1}],
    ids=["all slots work", "one waits", "a partial waits", "a reward is awaited", "no generator", "the trainer works"],
)
def test_a_batch_that_is_being_generated_has_no_stragglers_however_long_it_takes(healthy):
    limited = schedule("one_step_off", straggler_timeout_seconds=60)
    seen = blocked_for(6000, limited, view(ready=[group(1)], opened=[group(0)], unfinished=1))
    assert decide(limited, seen).evict
    decisions = decide(limited, replace(seen, **healthy))
    assert not decisions.blocked_by
    assert decisions.evict == ()


BATCH_OF_FOUR = schedule("sync", groups_per_batch=4, group_size=4, straggler_timeout_seconds=60)
HALF_A_BATCH = at_step(9, ready=[group(0, 9), group(1, 9)], opened=[group(2, 9), group(3, 9)], unfinished=5)
PACED = schedule(max_staleness=2, straggler_timeout_seconds=60)
DUE_GROUP = at_step(9, ready=[group(5, 9), group(6, 9)], opened=[group(1, 7)])


@pytest.mark.parametrize(
    ("rules", "seen"), [(BATCH_OF_FOUR, HALF_A_BATCH), (PACED, DUE_GROUP)], ids=["a batch lacks groups", "one is due"]
)
@pytest.mark.parametrize("instance", ["", "a"], ids=["all generators", "the only generator"])
def test_no_time_counts_for_stragglers_while_every_generator_is_pinned_to_an_older_version(rules, seen, instance):
    late = blocked_for(600, rules, seen)
    assert decide(rules, late).evict
    held = decide(rules, replace(late, pinned_version=5, pinned_instance=instance))
    assert held.blocked_by == ""
    assert held.evict == ()
    assert held.desired.waiting_for.endswith(
        "; every generator is pinned to policy version 5, older than the newest, 9"
    )
    released = decide(rules, replace(seen, now=late.now + 600))
    assert released.blocked_by, "the store has forgotten the time before"
    assert released.evict == ()
    assert "pinned" not in released.desired.waiting_for


@pytest.mark.parametrize(
    "pin",
    [{"pinned_version": 9}, {"pinned_version": 5, "pinned_instance": "a", "registered_generators": 2}],
    ids=["the newest version", "one of two generators"],
)
def test_the_time_counts_for_stragglers_while_a_generator_may_serve_the_newest_version(pin):
    late = decide(BATCH_OF_FOUR, replace(blocked_for(600, BATCH_OF_FOUR, HALF_A_BATCH), **pin))
    assert [eviction.group_id for eviction in late.evict] == ["e0-2", "e0-3"]
    assert "pinned" not in late.desired.waiting_for


def unlisted(seen):
    """The same mesh, read without single groups."""
    return replace(seen, listed=False, ready=(), stalest_open=())


@pytest.mark.parametrize(
    "seen",
    [
        at_step(3, ready=[group(5, 3), group(6, 3)]),
        at_step(3, opened=[group(1, 0)]),
        view(trained_step=3, cut_step=100, ready=[group(5, 3)]),
        view(ready=[group(1)], opened=[group(0)], blocked_by="lacking", blocked_since=0.0),
    ],
    ids=["a cut", "a stale group", "the end of the run", "a straggler"],
)
def test_a_view_without_groups_is_refused_where_the_decision_depends_on_them(seen):
    rules = schedule(max_staleness=2)
    assert needs_groups(rules, unlisted(seen))
    with pytest.raises(ValueError, match="read it with its groups"):
        decide(rules, unlisted(seen))
    assert not needs_groups(rules, seen)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"cut_step": 4, "ready_groups": 9},
        {"user_paused": True, "ready_groups": 9},
        {"recovering": True, "ready_groups": 9},
    ],
    ids=["too few are ready", "the trainer works", "paused", "recovering"],
)
def test_single_groups_are_not_read_while_nothing_can_be_cut(changes):
    seen = unlisted(at_step(3, ready=[group(5, 3)], opened=[group(1, 2)]))
    assert not needs_groups(schedule(max_staleness=2), replace(seen, **changes))


def test_counts_tell_a_cut_that_open_groups_block_without_the_ready_groups():
    rules = schedule(max_staleness=1)
    blocked = at_step(3, ready=[group(5, 3), group(6, 3)], opened=[group(1, 2), group(2, 3)])
    assert blocking_groups(rules, unlisted(blocked)) == 1
    decisions = decide(rules, replace(blocked, ready=(), stalest_open=blocked.stalest_open[:1]))
    assert decisions == decide(rules, blocked)
    assert decisions.cut is None and decisions.blocked_by.startswith("due ")


@pytest.mark.parametrize(
    "seen",
    [
        at_step(3, ready=[group(1, 2), group(5, 3)], opened=[group(6, 3)]),
        at_step(3, ready=[group(5, 3)], opened=[group(1, 2)]),
        at_step(3, ready=[group(4, 1), group(5, 3)], opened=[group(1, 2)]),
        at_step(3, cut_step=4, ready=[group(5, 3), group(6, 3)], opened=[group(1, 2)]),
        at_step(99, ready=[group(5, 99), group(6, 99)], opened=[group(1, 98)]),
    ],
    ids=["the quota is filled", "too few are ready", "one is stale", "the trainer works", "the last batch"],
)
def test_no_open_groups_block_a_cut_that_other_things_decide(seen):
    assert not blocking_groups(schedule(max_staleness=1), seen)


def test_due_groups_that_stale_ones_hold_off_the_bounded_lists_are_waited_for():
    rules = schedule(max_staleness=1)
    seen = at_step(3, ready=[group(1, 1), group(2, 2), group(3, 2), group(5, 3), group(6, 3)])
    assert plan_cut(rules, seen).group_ids == ("e0-2", "e0-3")
    plan = plan_cut(rules, replace(seen, ready=tuple(g for g in seen.ready if g.min_train_step != 2)))
    assert plan.group_ids is None and not plan.blocking
    assert "2 ready group(s) that are due" in plan.waiting_for


def test_nothing_is_cut_or_blocked_while_a_rollback_drops_the_abandoned_branch():
    rules = schedule(max_staleness=1)
    blocked = at_step(3, ready=[group(5, 3), group(6, 3)], opened=[group(1, 2)])
    seen = replace(blocked, ready=(), rolling_back=True)
    assert not blocking_groups(rules, seen)
    decisions = decide(rules, seen)
    assert decisions.cut is None and not decisions.blocked_by and "rollback" in decisions.desired.waiting_for


@pytest.mark.parametrize("on_stale", ["pace", "evict"])
def test_groups_over_the_bound_are_evicted_as_stale_and_never_cut(on_stale):
    seen = at_step(3, ready=[group(0, 0), group(5, 3), group(6, 3)], opened=[group(1, 0), group(2, 1)])
    decisions = decide(schedule("areal", max_staleness=2, on_stale=on_stale), seen)
    assert decisions.evict == (Eviction(group_id="e0-0", reason="stale"), Eviction(group_id="e0-1", reason="stale"))
    assert decisions.cut in (None, ("e0-5", "e0-6"))


def test_evict_does_not_wait_for_stragglers():
    seen = at_step(3, ready=[group(5, 3), group(6, 3)], opened=[group(1, 1)])
    decisions = decide(schedule(max_staleness=2, on_stale="evict"), seen)
    assert decisions.cut == ("e0-5", "e0-6")
    assert not decisions.blocked_by
    assert not decisions.evict


@pytest.mark.parametrize("on_stale", ["evict", "mask_old_segments"])
def test_no_group_opens_whose_first_token_the_next_batch_could_not_train(on_stale):
    rules = schedule(max_staleness=1, on_stale=on_stale, window_groups=6)
    late = view(trained_step=5, cut_step=6, policy_version=4, policy_train_step=4, in_training=2)
    decisions = decide(rules, late)
    assert decisions.admit_groups == 0
    assert "admission waits for the policy of a newer train step" in decisions.desired.waiting_for
    assert decide(rules, replace(late, policy_version=5, policy_train_step=5)).admit_groups > 0

    ready = [group(5, 4), group(6, 4)]
    cuts = decide(rules, at_step(5, policy_version=4, policy_train_step=4, ready=ready))
    assert (cuts.cut, cuts.admit_groups) == (("e0-5", "e0-6"), 0), "the cut makes the policy too old"
    assert decide(rules, at_step(5, ready=ready)).admit_groups > 0


def test_masking_trains_old_groups_in_admission_order():
    seen = at_step(9, ready=[group(0, 0), group(5, 9), group(6, 1)], opened=[group(1, 0)])
    decisions = decide(schedule(max_staleness=2, on_stale="mask_old_segments"), seen)
    assert decisions.cut == ("e0-0", "e0-5")
    assert not decisions.evict


def test_the_last_batch_of_the_run_waits_for_no_straggler():
    seen = at_step(3, ready=[group(5, 3), group(6, 3)], opened=[group(1, 1)])
    assert decide(schedule(max_staleness=2, train_steps=5), seen).blocked_by
    assert decide(schedule(max_staleness=2, train_steps=4), seen).cut == ("e0-5", "e0-6")


def test_what_the_last_batch_leaves_over_ends_as_run_complete():
    seen = view(trained_step=3, cut_step=4, ready=[group(5)], opened=[group(6), group(7, None)], in_training=2)
    decisions = decide(schedule(train_steps=4), seen)
    assert {e.group_id for e in decisions.evict} == {"e0-5", "e0-6", "e0-7"}
    assert {e.reason for e in decisions.evict} == {"run_complete"}
    assert decisions.desired.paused
    assert decisions.admit_groups == 0


def test_groups_open_for_as_many_rollouts_as_wait_for_their_tools_up_to_the_bound():
    rules = replace(schedule("copris", pool_size=4), most_waiting=4)
    desired = decide(rules, view()).desired
    assert (desired.pool_size, desired.most_waiting) == (4, 4)
    # ceil(N'/n) + B groups of work with n = B = 2; three are open, with six members in tools.
    opened = [group(at, 0) for at in range(3)]
    admitted = [decide(rules, view(opened=opened, waiting=n, desired=desired)).admit_groups for n in (0, 1, 2, 4, 6)]
    assert admitted == [1, 2, 2, 3, 3]
    assert decide(rules, view(opened=opened, waiting=6)).admit_groups == 1, "before the leader has written the bound"


def test_no_more_groups_open_than_the_remaining_steps_need_and_the_pool_holds():
    assert decide(schedule("sync", train_steps=1), view(in_training=0)).admit_groups == 2
    seen = at_step(8, opened=[group(0, 8), group(1, 8)], unfinished=2)
    assert decide(schedule("copris", train_steps=9), seen).admit_groups == 1
    assert decide(schedule("copris", train_steps=12), seen).admit_groups == 4


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        ({"memory_ratio": 0.8}, "memory of the store: 80% of maxmemory is used"),
        ({"policy_version": -1, "policy_train_step": -1}, "the initial policy"),
        ({"user_paused": True}, "an operator to resume"),
        ({"recovering": True}, "workers to register again"),
        ({"memory_ratio": 1.25, "opened": [group(0)], "unfinished": 4}, "the store is full (125% of maxmemory"),
    ],
)
def test_admission_stops_and_says_why(state, reason):
    decisions = decide(schedule(), view(**state))
    assert decisions.admit_groups == 0
    assert reason in decisions.desired.waiting_for


@pytest.mark.parametrize(("state", "paused"), [("user_paused", True), ("recovering", False)])
def test_a_paused_or_recovering_mesh_cuts_nothing(state, paused):
    ready = [group(0), group(1)]
    assert decide(schedule(), view(ready=ready)).cut is not None
    decisions = decide(schedule(), view(ready=ready, **{state: True}))
    assert (decisions.cut, decisions.desired.paused) == (None, paused)


@pytest.mark.parametrize(
    ("counter", "reason"),
    [("filtered_in_a_row", "had equal rewards"), ("unscored_in_a_row", "ended with fewer than two scored answers")],
)
def test_a_row_of_groups_that_no_batch_can_train_ends_the_run_with_the_reason(counter, reason):
    assert not decide(schedule(max_filtered_in_a_row=5), view(**{counter: 4})).fail
    failed = decide(schedule(max_filtered_in_a_row=5), view(**{counter: 5}))
    assert f"5 groups in a row {reason}" in failed.fail
    assert failed.admit_groups == 0


@pytest.mark.parametrize(
    ("opened", "policy", "floor"),
    [
        (0, 7, 3),  # 1 group admitted by the pool: 7 + 1 - 1 - 4
        (4, 7, 5),  # 4 open and 1 admitted leave in 3 batches: 7 + 3 - 1 - 4
        (9, 7, 7),  # all of the capacity: only the newest will do
    ],
)
def test_new_trajectories_start_on_weights_that_even_the_last_batch_can_still_train(opened, policy, floor):
    seen = at_step(policy, opened=[group(i, policy) for i in range(opened)], unfinished=8)
    decisions = decide(schedule("copris", max_staleness=4), seen)
    assert decisions.admit_groups == 1
    assert decisions.desired.start_at_version == floor
