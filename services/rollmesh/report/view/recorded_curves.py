"""Curves, evaluations and policies of a recorded run, as the gateway shows those of a live one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.models.items import PolicyView
from rollmesh.gateway.models.live import BesideCurves, EvaluationView, SeriesAnswer
from rollmesh.gateway.timeline_file import TimelineFile
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import evaluation_points, newest_per_step, number, published_versions


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCurves:
    """Curves of a run folder."""

    run: str
    """Name of the run; the name of its folder without a valid run file."""
    folder: str
    curves: Curves
    begin_time: float | None
    """Time of the first record of the run; None without records."""


def recorded_curves(run: RecordedRun) -> RecordedCurves:
    """Read all curves of the run."""
    curves, timeline = Curves(), TimelineFile()
    for record in newest_per_step(run.metrics.records):
        curves.add_report(record)
    for record in run.timeline.records:
        timeline.add(record, curves)
    curves.set_evaluations(recorded_evaluations(run))
    name = run.path.name if run.config is None else run.config.name
    return RecordedCurves(run=name, folder=str(run.path), curves=curves, begin_time=_begin_time(run))


def record_times(run: RecordedRun, place: slice) -> list[float]:
    """Return the known times of the records at one place of each file, such as the first or the last one."""
    files = (run.timeline.records, "t"), (run.metrics.records, "time"), (run.evaluations.records, "when")
    times = (number(record, field) for records, field in files for record in records[place])
    return [time for time in times if not math.isnan(time)]


def _begin_time(run: RecordedRun) -> float | None:
    return min(record_times(run, slice(0, 1)), default=None)


def curves_beside(shown: RecordedCurves, other: RecordedCurves, names: Sequence[str], points: int) -> SeriesAnswer:
    """Return the named curves of a run, with those of another run beside."""
    beside = BesideCurves(
        run=other.run if other.run != shown.run else other.folder,
        begin_time=other.begin_time,
        series=other.curves.answer(names, points).series,
    )
    answer = shown.curves.answer(names, points)
    return answer.model_copy(update={"begin_time": shown.begin_time, "beside": beside})


def recorded_evaluations(run: RecordedRun) -> list[EvaluationView]:
    """Return the newest evaluation of every version, by version."""
    found = {
        point.policy_version: EvaluationView(
            policy_version=point.policy_version,
            mean=point.mean,
            standard_error=None if math.isnan(point.standard_error) else point.standard_error,
            sample_count=point.n,
            time=None if math.isnan(point.when) else point.when,
        )
        for point in evaluation_points(run.evaluations.records)
    }
    return [found[version] for version in sorted(found)]


def recorded_policies(run: RecordedRun) -> list[PolicyView]:
    """Return the published policies, newest first."""
    evaluations = {point.policy_version: point for point in recorded_evaluations(run)}
    steps = published_versions(run.metrics.records, run.timeline.records, run.evaluations.records)
    newest = max(steps, default=-1)
    return [
        PolicyView(
            policy_version=version,
            train_step=steps[version],
            newest=version == newest,
            pinned=False,
            generators=0,
            evaluation=evaluations.get(version),
        )
        for version in sorted(steps, reverse=True)
    ]
