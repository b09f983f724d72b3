"""Unfinished groups that block the next batch, and their eviction after the straggler time-out.

A set of groups blocks the batch if the cut depends only on these groups. There are two kinds of such sets:

due      B groups are ready, but the batch must also contain unfinished groups (the rule of ``cutting.py``). The set is
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

from __future__ import annotations

import hashlib

from rollmesh.mesh import DropReason, Eviction, MeshView
from rollmesh.scheduling.auto_pool import pool_size
from rollmesh.scheduling.cutting import CutPlan
from rollmesh.scheduling.resolved_schedule import Schedule


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
