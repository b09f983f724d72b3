"""The leader's gauges of the whole mesh."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.mesh import CachePool, Desired, MeshView
from rollmesh.rollout.rollout_metrics import MeshMetrics, unclaimed_staleness
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling import Schedule
from rollmesh.store.queue_types import StoreCounts

VIEW = MeshView(
    now=100.0,
    trained_step=6,
    cut_step=7,
    policy_version=6,
    policy_train_step=6,
    admitted_unconsumed=9,
    open_groups=4,
    ready_groups=3,
    ready=(),
    stalest_open=(),
    unclaimed_by_step=((5, 2), (7, 5)),
    ready_by_step=((7, 3),),
    pending=1,
    partial=2,
    leased=3,
    finished=4,
    memory_ratio=0.25,
    filtered_in_a_row=1,
    blocked_since=None,
    registered_generators=1,
    recovering=False,
    user_paused=False,
    is_complete=False,
)


def exported(metrics: Metrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"rollmesh_rollout_{name}", labels)


def test_the_oldest_unclaimed_group_says_how_stale_the_next_batch_may_be() -> None:
    assert unclaimed_staleness(VIEW) == 2
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=((5, 0), (7, 5)))) == 0
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=())) == 0
    # A group that runs on the newest policy while an older batch is still being trained.
    assert unclaimed_staleness(replace(VIEW, unclaimed_by_step=((9, 1),))) == 0


def test_an_automatic_pool_shows_its_size_both_bounds_and_the_times_behind_them() -> None:
    metrics = Metrics("rollout")
    config = {
        "name": "auto",
        "folder": "runs/auto",
        "model": {"path": "model"},
        "schedule": {"groups_per_batch": 4, "group_size": 4, "pool_size": "auto"},
    }
    schedule = Schedule.from_config(RunConfig.model_validate(config))
    shown = MeshMetrics(metrics)
    shown.limits(schedule)
    assert exported(metrics, "pool_trajectories") == 0, "a replica that does not lead has no pool"
    desired = Desired(pool_size=12, cache_pool=CachePool(size=12, since=0.0, preemptions=0))
    shown.pool(schedule, replace(VIEW, ready_seconds=2.0, update_seconds=4.0), desired)
    assert exported(metrics, "pool_trajectories") == 12
    assert exported(metrics, "auto_pool_bound_trajectories", by="caches") == 12
    # 4 groups for the next batch, 4 * 2 / (4 * 4) and sqrt(4) / 2 more: 5.5, rounded up, of 4 trajectories.
    assert exported(metrics, "auto_pool_bound_trajectories", by="trainer") == 24
    assert exported(metrics, "ready_seconds") == 2
    assert exported(metrics, "update_seconds") == 4


@pytest.mark.parametrize(
    ("view", "desired", "failed", "reasons"),
    [
        (VIEW, False, False, set()),
        (replace(VIEW, user_paused=True), True, False, {"person"}),
        (replace(VIEW, recovering=True), False, False, {"recovery"}),
        (VIEW, True, True, {"failure"}),
        (VIEW, True, False, {"barrier"}),
        (replace(VIEW, user_paused=True), True, True, {"person", "failure"}),
        (replace(VIEW, is_complete=True), True, False, set()),
    ],
)
def test_a_pause_names_its_reason(view: MeshView, desired: bool, failed: bool, reasons: set[str]) -> None:
    metrics = Metrics("rollout")
    MeshMetrics(metrics).paused(view, desired=desired, failed=failed)
    shown = {by for by in ("person", "failure", "recovery", "barrier") if exported(metrics, "paused", by=by)}
    assert shown == reasons


def counts(**changes: Any) -> StoreCounts:
    names = ("scoring_queue", "sessions", "dead_letters", "used_memory_bytes", "max_memory_bytes")
    states = ("trajectories", "groups", "totals", "drops", "dropped_tokens", "drop_deciles")
    return StoreCounts(**{**dict.fromkeys(names, 0), **{name: {} for name in states}, **changes})


@pytest.mark.parametrize(("rests_since", "steps"), [(None, 0), (7, 0), (5, 2)])
def test_a_rest_is_as_old_as_the_policies_that_were_announced_since(rests_since: int | None, steps: int) -> None:
    metrics = Metrics("rollout")
    MeshMetrics(metrics).counted(counts(oldest_rest_step=rests_since), 7)
    assert exported(metrics, "oldest_rest_steps") == steps
