"""Groups over the staleness bound under each ``on_stale``, and the recall of groups that were set aside.

Restarted groups stay in their wave. Groups that were set aside collect until they fill a batch: then they are a long
round of their own (RollPacker, arXiv 2509.21009), in which every group is needed and none is spare.
"""

from __future__ import annotations

from dataclasses import replace

from rollmesh.mesh import Decisions, DropReason, Eviction, MeshView
from rollmesh.scheduling.axes import OnStale
from rollmesh.scheduling.cutting import any_stale, stale_groups
from rollmesh.scheduling.resolved_schedule import Schedule


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
