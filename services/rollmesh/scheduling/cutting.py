"""Choice of the groups of the next batch, the conditions of a cut, and the fates of groups that miss it.

Every group with tokens has a last batch that may train it: if its oldest token is of train step m, batch
m + max_staleness + 1. A cut within the bound is therefore earliest-deadline-first scheduling at B groups per batch.
A cut is safe iff for every k >= 0 it leaves at most k*B groups whose last batch is among the next k after this one.
k = 0 is the pace rule (a group whose last batch is this one must be in it); k > 0 prevents too many stragglers from
falling due at once.

Unfinished groups that block the next batch for the straggler time-out are evicted. A set of groups blocks it if the cut
depends only on these groups. There are two kinds of such sets:

due      B groups are ready, but the batch must also contain unfinished groups (the rule above). The set is
         these unfinished groups.
lacking  Fewer than B groups are ready, no group can be admitted, no trajectory waits for a lease or a reward, and part
         of the pool is idle. The set is the oldest open groups, as many as the batch lacks. Its name depends on the
         progress of the trajectories: it changes as soon as one of them ends or saves tokens.

While every slot that the batch can fill is filled, the batch is being generated and no set blocks it. The time-out
starts when a set begins to block; the store keeps this time with the name of the set. No time counts while no generator
is registered, while every generator is pinned to an older version than the newest (a trajectory with tokens of a newer
one waits for the release), or while no replica leads, so it starts again after each of these.

Trajectories that rest are woken before a group is evicted, because the blocking set may only rest. A due set wakes them
when it begins to block. A lacking set wakes them after the time-out: a lease of one of them changes its name and begins
the time again. If none of them is leased for a second time-out, the set is evicted.
"""

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from rollmesh.mesh import Decisions, DropReason, Eviction, GroupView, MeshView, WaitReason
from rollmesh.scheduling.auto_pool import pool_size
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


def blocking_set(schedule: Schedule, view: MeshView, plan: CutPlan, admitted: int) -> str:
    """Return the name of the set of groups that blocks the cut; empty if none does."""
    if plan.group_ids is not None or not view.registered_generators or view.older_pin is not None:
        return ""
    if plan.blocking:
        ids = " ".join(group.group_id for group in plan.blocking)
        return "due " + hashlib.blake2b(ids.encode(), digest_size=8).hexdigest()
    return "" if admitted else _lacking(schedule, view)


def stragglers(schedule: Schedule, view: MeshView, plan: CutPlan, blocked_by: str) -> tuple[Eviction, ...]:
    """Return evictions of the blocking set, once it has blocked the cut for the straggler time-out.

    A lacking set has a second time-out while trajectories rest: the first one wakes them.
    """
    if not blocked_by or not timed_out(schedule, view, blocked_by, 1 if plan.blocking or not view.resting else 2):
        return ()
    groups = plan.blocking or view.stalest_open[: schedule.groups_per_batch - view.ready_groups]
    return tuple(Eviction(group_id=group.group_id, reason=DropReason.STRAGGLER_TIMEOUT) for group in groups)


def timed_out(schedule: Schedule, view: MeshView, blocked_by: str, times: int = 1) -> bool:
    """Tell whether this set has blocked the cut for so many straggler time-outs."""
    if view.blocked_by != blocked_by or view.blocked_since is None:
        return False
    return view.now - view.blocked_since >= times * schedule.straggler_timeout_seconds


def wakes_resting(schedule: Schedule, view: MeshView, plan: CutPlan, admitted: int, blocked_by: str) -> bool:
    """Tell whether resting trajectories continue under the same policy, because the batch may wait for them alone.

    They then run until the next cut: with a rest after each segment, a hung trajectory beside them would get one more
    straggler time-out per segment.
    """
    if plan.group_ids is not None:
        return False
    if plan.blocking:
        return view.resting > 0
    if view.desired.rest_before_step > schedule.train_steps:
        return not admitted
    only_rest = view.unfinished + view.finished == view.resting and not view.undecided_groups
    return view.resting > 0 and not admitted and (only_rest or timed_out(schedule, view, blocked_by))


def _lacking(schedule: Schedule, view: MeshView) -> str:
    if view.cut_step != view.trained_step or view.ready_groups >= schedule.groups_per_batch:
        return ""
    # Resting ones wait for those that are leased, which may never end.
    if view.pending + view.partial + view.finished:
        return ""
    members = schedule.launched_members - schedule.spare_members if view.recalled_groups else schedule.launched_members
    slots = min(pool_size(schedule, view), (view.open_groups + view.ready_groups) * members)
    if not 0 < view.leased < slots:
        return ""
    progress = f"{view.open_groups} {view.leased} {view.finished_total} {view.saved_bytes_total}"
    return f"lacking {view.cut_step} {progress}"
