"""The scheduler's view of the queue model, as the store's ``view`` script and its reader return it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rollmesh.mesh import GroupView, MeshView
from rollmesh.sim.queue_model.model_records import GroupState
from rollmesh.sim.queue_model.model_restarts import RestartOperations
from rollmesh.sim.queue_model.model_state import QueueState
from rollmesh.types import TrajectoryState

_STEPS = 256
"""Most train steps in ``unclaimed_by_step`` and ``ready_by_step``."""


def read_view(state: RestartOperations, *, listed: bool, blocking: int, shortest: bool) -> MeshView:
    """Return the view.

    It costs O(1) without single groups, else O(groups of a batch and groups aside), with the shortest ones
    O(ready groups). With a number of ``blocking`` open groups it lists these, and no ready ones.
    """
    open_groups, ready_groups = state.listed[GroupState.OPEN], state.listed[GroupState.READY]
    unclaimed = state.unclaimed
    totals, counts = state.totals, state.counts
    saved_bytes, finished = totals["saved_bytes_total"], totals["finished_total"]
    unfinished = counts[TrajectoryState.LEASED] + len(state.partial) + len(state.resting) + len(state.pending)
    expected = state.used_memory_bytes + (unfinished * saved_bytes / finished if finished else 0)
    bound = 2 * state.limits.groups_per_batch if listed else 0
    is_blocked = state.blocked_since is not None and state.blocked_since <= state.now
    return MeshView(
        now=state.now,
        trained_step=state.trained_step,
        cut_step=state.cut_step,
        policy_version=state.policy_version,
        policy_train_step=state.version_steps[-1] if state.version_steps else 0,
        admitted_unconsumed=state.admitted_unconsumed,
        open_groups=len(state.groups[GroupState.OPEN]),
        ready_groups=len(state.groups[GroupState.READY]),
        listed=listed,
        ready=_views(state, ready_groups.in_order(0 if blocking else bound, shortest=shortest)),
        stalest_open=_views(state, open_groups.stalest(blocking or bound)),
        unclaimed_by_step=_by_step(state, unclaimed, oldest=min(unclaimed, default=0)),
        ready_by_step=_by_step(state, ready_groups.steps, oldest=min(unclaimed, default=0)),
        pending=len(state.pending),
        partial=len(state.partial),
        resting=len(state.resting),
        leased=counts[TrajectoryState.LEASED],
        finished=counts[TrajectoryState.FINISHED],
        memory_ratio=expected / state.max_memory_bytes if state.max_memory_bytes else 0.0,
        used_memory_bytes=state.used_memory_bytes,
        max_memory_bytes=state.max_memory_bytes,
        saved_bytes_total=saved_bytes,
        finished_total=finished,
        mean_prompt_bytes=totals["prompt_bytes_total"] / max(1, totals["prompts_total"]),
        filtered_in_a_row=state.filtered_in_a_row,
        unscored_in_a_row=state.unscored_in_a_row,
        blocked_by=state.blocked_by if is_blocked else "",
        blocked_since=state.blocked_since if is_blocked else None,
        registered_generators=state.registered_generators,
        desired=state.desired,
        ready_seconds=state.times.ready_seconds,
        ready_updates=state.times.ready_updates,
        update_seconds=state.times.update_seconds,
        undecided_groups=len(state.undecided),
        aside_groups=len(state.groups[GroupState.ASIDE]),
        recalled_groups=state.recalled_groups,
        aside=tuple(group.group_id for group in state.oldest_aside(bound)),
        failure=state.failure,
        recovering=state.recovering,
        user_paused=state.user_paused,
        launcher_paused=state.launcher_paused,
        is_complete=state.trained_step >= state.limits.train_steps,
    )


def _views(state: QueueState, groups: Iterable[GroupView]) -> tuple[GroupView, ...]:
    if not state.limits.mask_old_segments:
        return tuple(groups)
    # Tokens older than the bound are masked out of the loss, so they do not count.
    oldest = state.trained_step - state.limits.max_staleness
    return tuple(
        group
        if group.min_train_step is None or group.min_train_step >= oldest
        else replace(group, min_train_step=oldest)
        for group in groups
    )


def _by_step(state: QueueState, groups: Mapping[int, int], *, oldest: int) -> tuple[tuple[int, int], ...]:
    """Return the numbers of groups by step, of the steps from the oldest one on that a view covers."""
    if not groups:
        return ()
    newest = min(state.version_steps[-1], oldest + _STEPS - 1)
    return tuple(sorted((step, count) for step, count in groups.items() if step <= newest))
