"""One look at the mesh, one set of decisions.

Level-triggered: ``decide`` remembers nothing, so the leader may change at any moment, decisions may be applied twice,
late or not at all, and the next look still leads to the same end.
"""

from __future__ import annotations

from rollmesh.mesh import Decisions, Desired, Eviction, MeshView
from rollmesh.scheduling.admission import groups_to_admit, start_at_version
from rollmesh.scheduling.cutting import CutPlan, any_stale, plan_cut, stale_groups
from rollmesh.scheduling.schedule import Schedule
from rollmesh.scheduling.stragglers import blocking_set, stragglers, timed_out


def needs_groups(schedule: Schedule, view: MeshView) -> bool:
    """Whether ``decide`` has to see single groups: a cut, an eviction or the end of the run is possible.

    It is not while a batch is generated, so that these views cost the same at every batch size.
    """
    if view.listed:
        return False
    if _is_winding_down(schedule, view):
        return view.open_groups + view.ready_groups > 0
    if _at_rest(schedule, view) is not None:
        return False
    cut_possible = view.cut_step == view.trained_step and view.ready_groups >= schedule.groups_per_batch
    return cut_possible or any_stale(schedule, view) or timed_out(schedule, view, view.blocked_by)


def decide(schedule: Schedule, view: MeshView) -> Decisions:
    """Decide what to admit, cut, evict and desire, given one consistent view.

    The caller stores ``desired`` before it admits: new groups must never be leased under an older version floor.
    Raises ValueError for a view without the groups that the decision depends on (``needs_groups``).
    """
    if needs_groups(schedule, view):
        raise ValueError("decide: this view allows a cut or an eviction: read it with its groups")
    if _is_winding_down(schedule, view):
        return _wind_down(schedule, view)
    if (resting := _at_rest(schedule, view)) is not None:
        return resting
    plan = plan_cut(schedule, view)
    if schedule.barrier and plan.group_ids is not None:
        return Decisions(desired=_desired(schedule, view, 0, _barrier(view.cut_step + 1)), cut=plan.group_ids)
    admitted, not_admitted = groups_to_admit(schedule, view)
    blocked_by = blocking_set(schedule, view, plan, admitted)
    return Decisions(
        desired=_desired(schedule, view, admitted),
        admit_groups=admitted,
        cut=plan.group_ids,
        evict=stale_groups(schedule, view) + stragglers(schedule, view, plan, blocked_by),
        blocked_by=blocked_by,
        waiting_for=_waiting(plan, view, not_admitted),
    )


def _is_winding_down(schedule: Schedule, view: MeshView) -> bool:
    """Whether the last batch of the run has been cut."""
    return view.trained_enough or view.cut_step >= schedule.train_steps


def _at_rest(schedule: Schedule, view: MeshView) -> Decisions | None:
    """What to desire while nothing is cut, evicted or admitted; None while the mesh works."""
    if fail := _hopeless(schedule, view):
        return Decisions(desired=_desired(schedule, view, 0, "the run has failed"), fail=fail)
    if view.recovering:
        return Decisions(desired=_desired(schedule, view, 0), waiting_for="workers to register again with the store")
    if view.user_paused:
        return Decisions(desired=_desired(schedule, view, 0, "paused by a person"), waiting_for="a person to resume")
    if view.launcher_paused:
        reason = "the launcher: it evaluates a policy version"
        return Decisions(desired=_desired(schedule, view, 0, reason), waiting_for=reason)
    if schedule.barrier and view.cut_step > view.policy_train_step >= 0:
        reason = _barrier(view.cut_step)
        return Decisions(desired=_desired(schedule, view, 0, reason), waiting_for=reason)
    return None


def _hopeless(schedule: Schedule, view: MeshView) -> str:
    """Why going on would use up prompts and never train a step; empty while it would not."""
    most = schedule.max_filtered_in_a_row
    if view.filtered_in_a_row >= most:
        return (
            f"{view.filtered_in_a_row} groups in a row had equal rewards for all their answers "
            f"(schedule.max_filtered_in_a_row={most}): the task is far too easy or far too hard for this policy, or "
            "the verifier does not tell answers apart"
        )
    if view.unscored_in_a_row >= most:
        return (
            f"{view.unscored_in_a_row} groups in a row ended with fewer than two scored answers "
            f"(schedule.max_filtered_in_a_row={most}): the verifier, its judge or the environment fails for every "
            "answer; the dead letters and the logs of rollout and reward say how"
        )
    return ""


def _desired(schedule: Schedule, view: MeshView, admitted: int, paused: str = "") -> Desired:
    return Desired(
        pool_size=schedule.pool_size,
        paused=bool(paused),
        reason=paused,
        interrupt_below_version=max(0, view.policy_version) if schedule.barrier else 0,
        start_at_version=start_at_version(schedule, view, admitted),
    )


def _barrier(train_step: int) -> str:
    return f"barrier: waiting for the policy of train step {train_step}"


def _wind_down(schedule: Schedule, view: MeshView) -> Decisions:
    """Every group ends somewhere: what the last batch of the run left over is evicted and counted."""
    leftover = {g.group_id for g in (*view.ready, *view.stalest_open)}
    return Decisions(
        desired=_desired(schedule, view, 0, f"the batch of train step {schedule.train_steps} was the last one"),
        evict=tuple(Eviction(group_id=group_id, reason="run_complete") for group_id in sorted(leftover)),
        waiting_for="" if view.trained_enough else f"the trainer: step {view.cut_step} is cut and not trained yet",
    )


def _waiting(plan: CutPlan, view: MeshView, not_admitted: str) -> str:
    if plan.group_ids is None and view.memory_ratio >= 1:
        return (
            f"{plan.waiting_for}; the store is full ({view.memory_ratio:.0%} of maxmemory with what is still to be "
            "written): raise store.maxmemory_bytes (embedded) or the server's maxmemory"
        )
    nothing_runs = view.pending + view.partial + view.leased + view.finished == 0
    if plan.group_ids is None and nothing_runs and not_admitted:
        return f"{plan.waiting_for}; admission waits for {not_admitted}"
    return plan.waiting_for
