"""Schedules with large batches, and views of a mesh that is busy with them."""

from __future__ import annotations

from dataclasses import replace

from rollmesh.config import load_run_config
from rollmesh.config.recipes import recipe_file
from rollmesh.mesh import CachePool, Desired, EngineLoad, GroupView, MeshView
from rollmesh.scheduling import Schedule
from rollmesh.scheduling.presets import PRESETS, companion_settings

_STEP = 100
"""Train step of the views: the middle of a run."""


def large_batch_schedule(preset: str, groups_per_batch: int, *overrides: str) -> Schedule:
    """Return the schedule of a preset with this batch, its own numbers in everything else, and then ``overrides``."""
    settings = ["schedule.pool_size=null", "schedule.max_staleness=null", f"schedule.preset={preset}"]
    settings += [*companion_settings(PRESETS[preset]), f"schedule.groups_per_batch={groups_per_batch}"]
    settings += [f"trainer.train_steps={2 * _STEP}", *overrides]
    return Schedule.from_config(load_run_config(recipe_file("countdown", "demo.yaml"), settings, environ={}))


def view_without_cut(schedule: Schedule) -> MeshView:
    """Return the view of a full window, read without single groups, in which one group of the batch is missing."""
    ready = schedule.groups_per_batch - 1
    opened = schedule.window_groups - ready
    return _view(schedule, ready=(), opened=(), ready_groups=ready, open_groups=opened, listed=False)


def view_with_evidence(schedule: Schedule) -> MeshView:
    """Return the view without a cut with all that an automatic pool follows: times, caches, and their bound so far."""
    view = view_without_cut(schedule)
    bound = CachePool(size=schedule.pool_size, since=view.now - 60.0, preemptions=0)
    capacity = 4 * schedule.pool_size * schedule.longest_trajectory_tokens
    return replace(
        view,
        desired=replace(view.desired, cache_pool=bound),
        engines=EngineLoad(
            slots=schedule.pool_size, waiting=0, kv_tokens_used=0, kv_token_capacity=capacity, preemptions=0
        ),
        mean_cached_tokens=schedule.longest_trajectory_tokens / 3,
        ready_seconds=20.0,
        update_seconds=10.0,
        ready_updates=1.5,
    )


def view_for_cut(schedule: Schedule) -> MeshView:
    """Return the view of a full window with as many ready groups as the view lists, of all train steps in the bound."""
    listed = 2 * schedule.groups_per_batch
    ready = min(schedule.window_groups, listed)
    opened = schedule.window_groups - ready
    groups = [_group(schedule, index) for index in range(ready)]
    others = [_group(schedule, ready + index) for index in range(opened)]
    others.sort(key=lambda g: (g.min_train_step, g.admission_index))
    shown = tuple(others[:listed])
    return _view(schedule, ready=tuple(groups), opened=shown, ready_groups=ready, open_groups=opened, listed=True)


def _group(schedule: Schedule, index: int) -> GroupView:
    """Return a group with tokens of the newest policy, or older ones the earlier it was admitted."""
    age = schedule.max_staleness - index // schedule.groups_per_batch
    step = _STEP - min(max(age, 0), schedule.max_staleness)
    return GroupView(
        group_id=f"e0-{index}", admission_index=index, min_train_step=step, token_count=64 + 37 * index % 4096
    )


def _view(
    schedule: Schedule,
    *,
    ready: tuple[GroupView, ...],
    opened: tuple[GroupView, ...],
    ready_groups: int,
    open_groups: int,
    listed: bool,
) -> MeshView:
    steps = [_group(schedule, index).min_train_step or 0 for index in range(ready_groups + open_groups)]
    ready_steps = steps[:ready_groups]
    unfinished = open_groups * schedule.launched_members
    return MeshView(
        now=1000.0,
        trained_step=_STEP,
        cut_step=_STEP,
        policy_version=_STEP,
        policy_train_step=_STEP,
        admitted_unconsumed=ready_groups + open_groups,
        open_groups=open_groups,
        ready_groups=ready_groups,
        listed=listed,
        ready=ready,
        stalest_open=opened,
        unclaimed_by_step=tuple((step, steps.count(step)) for step in sorted(set(steps))),
        ready_by_step=tuple((step, ready_steps.count(step)) for step in sorted(set(ready_steps))),
        pending=max(0, unfinished - schedule.pool_size),
        partial=0,
        leased=min(unfinished, schedule.pool_size),
        finished=0,
        memory_ratio=0.1,
        filtered_in_a_row=0,
        blocked_since=None,
        registered_generators=64,
        desired=Desired(pool_size=schedule.pool_size),
        recovering=False,
        user_paused=False,
        is_complete=False,
    )
