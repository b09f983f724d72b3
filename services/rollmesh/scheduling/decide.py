"""Decisions of the leader, as a pure function of one view of the mesh.

They are level-triggered: ``decide`` has no memory. The leader may change at any moment, and decisions may be applied
twice, late or not at all; the next view still leads to the same result.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from rollmesh.mesh import Decisions, Desired, DropReason, Eviction, MeshView, WaitReason, WasteReason
from rollmesh.scheduling.admission import groups_to_admit, start_at_version
from rollmesh.scheduling.auto_pool import pool_and_bound
from rollmesh.scheduling.axes import OnStale
from rollmesh.scheduling.cutting import (
    CutPlan,
    any_stale,
    blocking_set,
    groups_to_recall,
    may_begin_again,
    plan_cut,
    stragglers,
    timed_out,
    wakes_resting,
    with_fates,
)
from rollmesh.scheduling.resolved_schedule import Schedule


def needs_groups(schedule: Schedule, view: MeshView) -> bool:
    """Tell whether ``decide`` needs single groups: a cut, an eviction or the end of the run is possible.

    It does not while a batch is being generated, so the cost of these views does not depend on the batch size.
    """
    if view.listed:
        return False
    if _is_winding_down(schedule, view):
        return view.open_groups + view.ready_groups + view.aside_groups > 0
    if _stopped(schedule, view) is not None:
        return _begins_again_at_barrier(schedule, view)
    cut_possible = view.cut_step == view.trained_step and view.ready_groups >= schedule.groups_per_batch
    return cut_possible or any_stale(schedule, view) or timed_out(schedule, view, view.blocked_by)


def decide(schedule: Schedule, view: MeshView) -> Decisions:
    """Decide on admission, cut, evictions and desired state, given one consistent view.

    The caller must store ``desired`` before it admits: new groups must never be leased under an older version floor.
    Raises ValueError for a view without the groups that the decision depends on (``needs_groups``).
    """
    if needs_groups(schedule, view):
        raise ValueError("decide: this view allows a cut or an eviction: read it with its groups")
    if _is_winding_down(schedule, view):
        return _wind_down(schedule, view)
    if (stopped := _stopped(schedule, view)) is not None:
        return with_fates(schedule, view, stopped) if _begins_again_at_barrier(schedule, view) else stopped
    plan = plan_cut(schedule, view)
    if schedule.barrier and plan.group_ids is not None:
        return Decisions(desired=_desired(schedule, view, paused=_barrier(view.cut_step + 1)), cut=plan.group_ids)
    recall = groups_to_recall(schedule, view)
    # Groups that are set aside now may fill the long round: new groups would postpone it.
    sets_aside = schedule.on_stale is OnStale.SET_ASIDE and any_stale(schedule, view)
    admitted, not_admitted = 0, WaitReason.LONG_ROUND.format()
    if not recall and not sets_aside:
        admitted, not_admitted = groups_to_admit(schedule, view, cuts=plan.group_ids is not None)
    blocked_by = blocking_set(schedule, view, plan, admitted + recall)
    decisions = Decisions(
        desired=_desired(
            schedule,
            view,
            admitted + recall,
            waiting_for=_waiting(plan, view, not_admitted),
            wakes=wakes_resting(schedule, view, plan, admitted + recall, blocked_by),
        ),
        admit_groups=admitted,
        recall=recall,
        cut=plan.group_ids,
        evict=stragglers(schedule, view, plan, blocked_by),
        blocked_by=blocked_by,
    )
    return with_fates(schedule, view, decisions)


def _is_winding_down(schedule: Schedule, view: MeshView) -> bool:
    """Tell whether the last batch of the run has been cut."""
    return view.is_complete or view.cut_step >= schedule.train_steps


def _stopped(schedule: Schedule, view: MeshView) -> Decisions | None:
    """Return the decisions of a failed, recovering or paused mesh; None while the mesh works."""
    if fail := _hopeless(schedule, view):
        return Decisions(desired=_desired(schedule, view, paused="the run has failed"), fail=fail)
    if until := view.rests_until:
        paused = "" if view.recovering else "paused by an operator" if view.user_paused else until
        return Decisions(desired=_desired(schedule, view, paused=paused, waiting_for=until))
    if _waits_for_policy(schedule, view):
        reason = _barrier(view.cut_step)
        return Decisions(desired=_desired(schedule, view, paused=reason, waiting_for=reason))
    return None


def _waits_for_policy(schedule: Schedule, view: MeshView) -> bool:
    """Tell whether the mesh rests at a barrier: nothing else stops it."""
    if _hopeless(schedule, view) or view.rests_until:
        return False
    return schedule.barrier and view.cut_step > view.policy_train_step >= 0


def _begins_again_at_barrier(schedule: Schedule, view: MeshView) -> bool:
    """Tell whether groups begin again now, at a barrier; groups are evicted only after it."""
    return _waits_for_policy(schedule, view) and may_begin_again(schedule, view)


def _hopeless(schedule: Schedule, view: MeshView) -> str:
    """Return the reason that the run would use up prompts without training a step; empty without one."""
    most = schedule.max_filtered_in_a_row
    if view.filtered_in_a_row >= most:
        return (
            f"{view.filtered_in_a_row} groups in a row had equal rewards for all their answers "
            f"(schedule.max_filtered_in_a_row={most}): the task is far too easy or far too hard for this policy, or "
            "the verifier does not distinguish answers"
        )
    if view.unscored_in_a_row >= most:
        too_few = "fewer than two scored answers" if schedule.group_size > 1 else "no scored answer"
        return (
            f"{view.unscored_in_a_row} groups in a row ended with {too_few} "
            f"(schedule.max_filtered_in_a_row={most}): generation, the verifier, its judge or the environment fails "
            "for every answer; see the dead letters and the logs of rollout and reward"
        )
    return ""


def _desired(
    schedule: Schedule,
    view: MeshView,
    admitted: int = 0,
    *,
    paused: str = "",
    waiting_for: str = "",
    wakes: bool = False,
) -> Desired:
    pool, by_caches = pool_and_bound(schedule, view)
    return Desired(
        pool_size=pool,
        most_waiting=schedule.most_waiting,
        cache_pool=by_caches,
        paused=bool(paused),
        reason=paused,
        interrupt_below_version=max(0, view.policy_version) if schedule.barrier else 0,
        start_at_version=start_at_version(schedule, view, admitted),
        rest_before_step=_rest_before_step(schedule, view, wakes),
        waiting_for=waiting_for,
    )


def _rest_before_step(schedule: Schedule, view: MeshView, wakes: bool) -> int:
    """Return a step after every policy of the run to wake all that rests, even what rested before a rollback.

    Trajectories that rested before a run was continued without segments wake too.
    """
    if not (schedule.segment_tokens or view.resting):
        return 0
    if wakes or not schedule.segment_tokens:
        return schedule.train_steps + 1
    return max(0, view.policy_train_step)


def _barrier(train_step: int) -> str:
    return WaitReason.BARRIER.format(step=train_step)


def _wind_down(schedule: Schedule, view: MeshView) -> Decisions:
    """Evict the groups that remain after the last batch of the run, so that every group is accounted for."""
    leftover = {*(g.group_id for g in (*view.ready, *view.stalest_open)), *view.aside}
    return Decisions(
        desired=_desired(
            schedule,
            view,
            paused=f"the batch of train step {schedule.train_steps} was the last one",
            waiting_for="" if view.is_complete else WaitReason.UNTRAINED_CUT.format(step=view.cut_step),
        ),
        evict=tuple(Eviction(group_id=group_id, reason=DropReason.RUN_COMPLETE) for group_id in sorted(leftover)),
    )


def _waiting(plan: CutPlan, view: MeshView, not_admitted: str) -> str:
    if plan.group_ids is None and view.memory_ratio >= 1:
        return f"{plan.waiting_for}; {WaitReason.STORE_FULL.format(ratio=view.memory_ratio)}"
    nothing_runs = view.unfinished + view.finished == 0
    if plan.group_ids is None and nothing_runs and not_admitted:
        return f"{plan.waiting_for}; {WaitReason.ADMISSION.format(reason=not_admitted)}"
    if plan.group_ids is None and (pinned := view.older_pin) is not None:
        return f"{plan.waiting_for}; {WaitReason.OLDER_PIN.format(version=pinned, newest=view.policy_version)}"
    return plan.waiting_for


@dataclass(frozen=True, slots=True)
class SetDesired:
    """Write the desired state, with the name of the groups that block the cut."""

    desired: Desired
    blocked_by: str


@dataclass(frozen=True, slots=True)
class Evict:
    """Drop groups."""

    group_ids: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class BeginAgain:
    """Take the tokens of groups, which open again at once or wait aside for a recall."""

    group_ids: tuple[str, ...]
    reason: WasteReason
    """RESTARTED, or SET_ASIDE for groups that wait."""


@dataclass(frozen=True, slots=True)
class CutBatch:
    """Fix the batch of the next train step."""

    group_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Recall:
    """Open the oldest groups that are aside, until ``count`` were recalled for the next batch."""

    count: int


@dataclass(frozen=True, slots=True)
class Admit:
    """Open new groups."""

    count: int


LeaderStep = SetDesired | Evict | BeginAgain | CutBatch | Recall | Admit


def leader_steps(decisions: Decisions) -> Iterator[LeaderStep]:
    """Yield the steps in order; a leader that dies has made the first few of them, and the next one decides again.

    The desired state is first: groups must never be leased under a version floor older than their admission.
    """
    yield SetDesired(decisions.desired, decisions.blocked_by)
    for reason in dict.fromkeys(eviction.reason for eviction in decisions.evict):
        yield Evict(tuple(each.group_id for each in decisions.evict if each.reason == reason), reason)
    if decisions.restart:
        yield BeginAgain(decisions.restart, WasteReason.RESTARTED)
    if decisions.set_aside:
        yield BeginAgain(decisions.set_aside, WasteReason.SET_ASIDE)
    if decisions.cut is not None:
        yield CutBatch(decisions.cut)
    if decisions.recall:
        yield Recall(decisions.recall)
    if decisions.admit_groups:
        yield Admit(decisions.admit_groups)
