"""Choice of the groups of the next batch, and the conditions of a cut.

Every group with tokens has a last batch that may train it: if its oldest token is of train step m, batch
m + max_staleness + 1. A cut within the bound is therefore earliest-deadline-first scheduling at B groups per batch.
A cut is safe iff for every k >= 0 it leaves at most k*B groups whose last batch is among the next k after this one.
k = 0 is the pace rule (a group whose last batch is this one must be in it); k > 0 prevents too many stragglers from
falling due at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from rollmesh.mesh import Decisions, DropReason, Eviction, GroupView, MeshView, WaitReason
from rollmesh.scheduling.axes import CutOrder, OnStale
from rollmesh.scheduling.resolved_schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class CutPlan:
    """Next batch, or the reason that it cannot be cut yet."""

    group_ids: tuple[str, ...] | None = None
    waiting_for: str = ""
    blocking: tuple[GroupView, ...] = ()
    """Open groups that must be in the next batch and block its cut, although enough other groups are ready."""


def stale_groups(schedule: Schedule, view: MeshView) -> tuple[str, ...]:
    """Return the open and ready groups that exceed the staleness bound at the next cut.

    Under ``pace`` there are none, unless an operator lowered the bound or rolled the trainer forward.
    """
    # docs/architecture.md: The staleness bound
    if not any_stale(schedule, view):
        return ()
    oldest = _oldest_step(schedule, view)
    known = {g.group_id: g for g in (*view.ready, *view.stalest_open)}
    return tuple(g.group_id for g in known.values() if g.min_train_step is not None and g.min_train_step < oldest)


def any_stale(schedule: Schedule, view: MeshView) -> bool:
    """Tell from the counts of the view whether an open or ready group exceeds the staleness bound."""
    steps = view.unclaimed_by_step
    if not steps or schedule.on_stale is OnStale.MASK_OLD_SEGMENTS:
        return False
    return view.cut_step - steps[0][0] > schedule.max_staleness


def plan_cut(schedule: Schedule, view: MeshView) -> CutPlan:
    """Plan batch cut_step + 1: the groups that are due, earliest deadline first, then the others.

    Groups of one deadline, and the others, are in ``cut_order``.
    """
    # docs/architecture.md: The staleness bound
    batch = schedule.groups_per_batch
    if view.cut_step != view.trained_step:
        return CutPlan(waiting_for=WaitReason.UNTRAINED_CUT.format(step=view.cut_step))
    if view.rolling_back:
        return CutPlan(waiting_for=WaitReason.ROLLBACK.format())
    oldest = _oldest_step(schedule, view)
    fresh = view.ready_groups - sum(count for step, count in view.ready_by_step if step < oldest)
    if fresh < batch:
        return CutPlan(waiting_for=WaitReason.READY_GROUPS.format(missing=batch - fresh, batch=batch))
    # A blocked cut is planned again after every change of the queue: counts tell it without the ready groups.
    if (quota := _unfilled_quota(schedule, view)) is not None:
        return _blocked(view, *quota)
    ready = [g for g in view.ready if g.min_train_step is None or g.min_train_step >= oldest]
    if len(ready) < batch:
        return CutPlan(waiting_for=WaitReason.READY_GROUPS.format(missing=batch - len(ready), batch=batch))
    in_order = sorted(ready, key=lambda g: g.admission_index)
    order = cut_key(schedule.cut_order)
    by_deadline = sorted(
        (g for g in in_order if g.min_train_step is not None), key=lambda g: (g.min_train_step, order(g))
    )
    chosen: list[GroupView] = []
    for newest_step, needed in _quotas(schedule, view):
        due = [g for g in by_deadline if g.min_train_step is not None and g.min_train_step <= newest_step]
        if schedule.on_stale is OnStale.PACE and len(due) < needed:
            # The lists are bounded: stale groups, which are evicted first, may have filled them.
            return CutPlan(waiting_for=WaitReason.STALE_GROUPS.format(missing=needed - len(due)))
        chosen = due[: max(len(chosen), needed)]
    urgent = {g.group_id for g in chosen}
    rest = sorted((g for g in in_order if g.group_id not in urgent), key=order)
    return CutPlan(group_ids=tuple(g.group_id for g in (chosen + rest)[:batch]))


def blocking_groups(schedule: Schedule, view: MeshView) -> int:
    """Return from the counts of the view how many unfinished groups block the next batch, although enough are ready."""
    ready = view.cut_step == view.trained_step and view.ready_groups >= schedule.groups_per_batch
    if not ready or view.rolling_back or any_stale(schedule, view):
        return 0
    _, missing = _unfilled_quota(schedule, view) or (0, 0)
    return missing


def _unfilled_quota(schedule: Schedule, view: MeshView) -> tuple[int, int] | None:
    """Return the first train step whose quota the ready groups do not fill, and the groups that it lacks.

    Only ``pace`` has quotas that must be filled.
    """
    if schedule.on_stale is not OnStale.PACE:
        return None
    oldest = _oldest_step(schedule, view)
    for newest_step, needed in _quotas(schedule, view):
        missing = needed - sum(count for step, count in view.ready_by_step if oldest <= step <= newest_step)
        if missing > 0:
            return newest_step, missing
    return None


def _blocked(view: MeshView, newest_step: int, missing: int) -> CutPlan:
    """Return the plan of a cut that lacks unfinished groups with tokens this old."""
    due = (g for g in view.stalest_open if g.min_train_step is not None and g.min_train_step <= newest_step)
    return CutPlan(
        blocking=tuple(islice(due, missing)),
        waiting_for=WaitReason.DUE_GROUPS.format(missing=missing, step=newest_step),
    )


def _quotas(schedule: Schedule, view: MeshView) -> Iterator[tuple[int, int]]:
    """Yield (train step, least number of groups with tokens that old in the next batch), oldest first.

    The last batch of the run has no quotas, because the remaining groups are never trained.
    """
    if schedule.on_stale is OnStale.MASK_OLD_SEGMENTS or view.cut_step + 1 >= schedule.train_steps:
        return
    batch = schedule.groups_per_batch
    oldest = view.cut_step - schedule.max_staleness
    for later in range(schedule.max_staleness + 1):
        newest_step = oldest + later
        due = sum(count for step, count in view.unclaimed_by_step if oldest <= step <= newest_step)
        needed = min(due - later * batch, batch)
        if needed > 0:
            yield newest_step, needed


def _oldest_step(schedule: Schedule, view: MeshView) -> float:
    """Return the oldest train step whose tokens the next batch may train on."""
    return -math.inf if schedule.on_stale is OnStale.MASK_OLD_SEGMENTS else view.cut_step - schedule.max_staleness


def cut_key(order: CutOrder) -> Callable[[GroupView], tuple[float, int]]:
    """Return the sort key of ready groups; equal groups leave in admission order."""

    def key(group: GroupView) -> tuple[float, int]:
        first = 0.0
        if order is CutOrder.SHORTEST:
            first = group.token_count
        elif order is CutOrder.OLDEST:
            first = math.inf if group.min_train_step is None else group.min_train_step
        return first, group.admission_index

    return key


def may_begin_again(schedule: Schedule, view: MeshView) -> bool:
    """Tell from the counts of the view whether a group begins again."""
    return schedule.on_stale in (OnStale.RESTART, OnStale.SET_ASIDE) and any_stale(schedule, view)


def with_fates(schedule: Schedule, view: MeshView, decisions: Decisions) -> Decisions:
    """Add what happens to the open and ready groups that exceed the staleness bound at the next cut."""
    # docs/architecture.md: The staleness bound
    ids = stale_groups(schedule, view)
    match schedule.on_stale:
        case OnStale.RESTART:
            return replace(decisions, restart=ids)
        case OnStale.SET_ASIDE:
            return replace(decisions, set_aside=ids)
        case _:
            evicted = tuple(Eviction(group_id=group_id, reason=DropReason.STALE) for group_id in ids)
            return replace(decisions, evict=evicted + decisions.evict)


def groups_to_recall(schedule: Schedule, view: MeshView) -> int:
    """Return B when a long round begins, or when a leader has left its recall unfinished; else 0.

    It begins when B groups are aside, and no group is ready or has tokens. If all groups of a long round are dropped,
    new groups take their place.
    """
    batch = schedule.groups_per_batch
    if view.recalled_groups:
        return batch if view.recalled_groups < batch and view.aside_groups else 0
    is_idle = not view.ready_groups and not view.unclaimed_by_step
    return batch if is_idle and view.aside_groups >= batch else 0
