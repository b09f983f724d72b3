"""Overview of a run that has ended, from its run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.gateway.mesh_snapshot import MOST_EVALUATIONS
from rollmesh.gateway.models.ending import ResultLine, RunResultView
from rollmesh.gateway.models.live import (
    DropView,
    MemoryView,
    Overview,
    Rates,
    RunState,
    Staleness,
    WasteView,
)
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.run_ending import ending
from rollmesh.report.series import newest_per_step, train_series
from rollmesh.report.summary import RunSummary, summarise
from rollmesh.report.view.recorded_curves import RecordedCurves, record_times, recorded_evaluations, recorded_policies
from rollmesh.scheduling import Schedule
from rollmesh.store.queue_types import WASTE_TOTALS

_SHOWN = ("state", "report")
"""Facts that the page shows in another form: the state in its head, the report as a link."""


def recorded_overview(run: RecordedRun, config: RunConfig, recorded: RecordedCurves, *, report: bool) -> Overview:
    """Return the overview; ``report`` is true if the report of the run is served beside the page."""
    summary, schedule = summarise(run), Schedule.from_config(config)
    last = newest_per_step(run.metrics.records)[-1:]
    mesh: Mapping[str, Any] = last[0].get("mesh", {}) if last else {}
    newest = next(iter(recorded_policies(run)), None)
    begin_time, curves = recorded.begin_time, recorded.curves
    end_time = max(record_times(run, slice(-1, None)), default=None)
    paused = float(np.diff(train_series(run.metrics.records, run.timeline.records).pauses).sum())
    return Overview(
        run=config.name,
        time=end_time or 0.0,
        age_seconds=0.0,
        state=_state(run, summary),
        waiting_for=run.failure,
        paused_by_person=False,
        train_step=summary.train_steps,
        train_steps=config.trainer.train_steps,
        cut_step=summary.train_steps,
        newest_version=-1 if newest is None else newest.policy_version,
        newest_train_step=0 if newest is None else newest.train_step,
        pinned_version=None,
        rollback_to=None,
        pool_size=schedule.pool_size,
        trajectories={},
        groups={},
        staleness=Staleness(bound=schedule.max_staleness, queue=[], trained=curves.trained_staleness),
        drops=_drops(summary, mesh),
        waste=_waste(mesh),
        generators=[],
        generator_count=0,
        evaluations=recorded_evaluations(run)[-MOST_EVALUATIONS:],
        memory=MemoryView(used_bytes=0, max_bytes=0, ratio=0.0),
        rates=Rates(saved_tokens_per_second=0.0, finished_per_second=0.0, trained_groups_per_second=0.0),
        report=curves.report,
        totals=_counts(mesh.get("totals")),
        workers=0,
        dead_letters=0,
        services=[],
        elapsed_seconds=None if begin_time is None or end_time is None else max(0.0, end_time - begin_time - paused),
        result=RunResultView(
            time=end_time,
            lines=[ResultLine(name=name, value=value) for name, value in ending(run.path) if name not in _SHOWN],
            report=report,
        ),
    )


def _state(run: RecordedRun, summary: RunSummary) -> RunState:
    if run.failure:
        return "failed"
    return "complete" if summary.finished else "stopped"


def _drops(summary: RunSummary, mesh: Mapping[str, Any]) -> list[DropView]:
    wasted = _counts(mesh.get("wasted_tokens"))
    return [
        DropView(reason=reason, groups=groups, tokens=wasted.get(reason, 0))
        for reason, groups in sorted(summary.dropped.items())
        if groups
    ]


def _waste(mesh: Mapping[str, Any]) -> tuple[WasteView, ...]:
    wasted, totals = _counts(mesh.get("wasted_tokens")), _counts(mesh.get("totals"))
    return tuple(
        WasteView(reason=reason, count=totals[total], tokens=wasted.get(reason, 0))
        for reason, total in WASTE_TOTALS.items()
        if totals.get(total)
    )


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping):
        return {}
    return {str(name): int(count) for name, count in value.items() if isinstance(count, int | float)}
