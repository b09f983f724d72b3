"""Overview of a run that has ended, from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollmesh.gateway.mesh_snapshot import MOST_EVALUATIONS, drop_views, waste_views
from rollmesh.gateway.models.live import MemoryView, Overview, Rates, Staleness, StalenessBin, Timeline
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import newest_per_step, train_series
from rollmesh.report.summary import summarise
from rollmesh.report.view.recorded_curves import RecordedCurves, record_times, recorded_evaluations, recorded_policies
from rollmesh.report.view.run_result import run_result


def recorded_overview(run: RecordedRun, recorded: RecordedCurves, *, report: bool = False) -> Overview:
    """Return the overview; ``report`` is true if the report of the run is served beside the page."""
    summary, train = summarise(run), train_series(run.metrics.records, run.timeline.records)
    last = newest_per_step(run.metrics.records)[-1:]
    mesh: Mapping[str, Any] = last[0].get("mesh", {}) if last else {}
    newest = next(iter(recorded_policies(run)), None)
    wasted, totals = _counts(mesh.get("wasted_tokens")), _counts(mesh.get("totals"))
    begin_time, end_time = recorded.begin_time, max(record_times(run, slice(-1, None)), default=None)
    elapsed = None if begin_time is None or end_time is None else end_time - begin_time - np.diff(train.pauses).sum()
    trained = [StalenessBin(staleness=steps, count=int(n)) for steps, n in train.staleness_counts.items()]
    bound = summary.max_staleness if summary.max_staleness is not None else summary.largest_staleness or 0
    return Overview(
        run=run.name,
        time=end_time or 0.0,
        age_seconds=0.0,
        state="failed" if run.failure else "complete" if summary.finished else "stopped",
        waiting_for=run.failure,
        paused_by_person=False,
        train_step=summary.train_steps,
        train_steps=summary.planned_steps or summary.train_steps,
        cut_step=summary.train_steps,
        newest_version=-1 if newest is None else newest.policy_version,
        newest_train_step=0 if newest is None else newest.train_step,
        pinned_version=None,
        rollback_to=None,
        pool_size=0 if run.schedule is None else run.schedule.pool_size,
        trajectories={},
        groups={},
        staleness=Staleness(bound=bound, queue=[], trained=trained),
        drops=drop_views(summary.dropped, wasted),
        waste=waste_views(totals, wasted),
        generators=[],
        generator_count=0,
        evaluations=recorded_evaluations(run)[-MOST_EVALUATIONS:],
        memory=MemoryView(used_bytes=0, max_bytes=0, ratio=0.0),
        rates=Rates(saved_tokens_per_second=0.0, finished_per_second=0.0, trained_groups_per_second=0.0),
        report=recorded.curves.report,
        totals=totals,
        workers=0,
        dead_letters=0,
        services=[],
        elapsed_seconds=elapsed,
        result=run_result(run, summary, report=report),
    )


def no_rollouts(overview: Overview) -> Timeline:
    """Return the timeline of a run in which nothing is in progress."""
    return Timeline(time=overview.time, window_seconds=0.0, in_flight=0, left_out=0, rollouts=[])


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): int(count) for name, count in value.items() if isinstance(count, int | float)}
