"""Curves, evaluations, policies and history of a recorded run, as the page shows them."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rollmesh.gateway.curves import Curves, TimelineFile
from rollmesh.gateway.models.items import PolicyView
from rollmesh.gateway.models.live import BesideCurves, EvaluationView, Series, SeriesAnswer
from rollmesh.gateway.models.overview import MeshHistory, VersionCalls
from rollmesh.report.recorded_run import Evaluation, RecordedRun
from rollmesh.report.series import (
    FloatArray,
    binned,
    broken,
    newest_per_step,
    number,
    published_versions,
    rate,
    timeline_series,
    train_series,
)
from rollmesh.report.versions import version_lives

_MOST_MOMENTS = 300
_MOST_RATES = 120
_STATES = ("leased", "finished", "partial", "resting", "pending")


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
    for series in (*_throughput(run), *_lives(run)):
        curves.add_series(series)
    begin_time = min(record_times(run, slice(0, 1)), default=None)
    return RecordedCurves(run=run.name, folder=str(run.path), curves=curves, begin_time=begin_time)


def record_times(run: RecordedRun, place: slice) -> list[float]:
    """Return the known times of the records at one place of each file, such as the first or the last one."""
    files = (run.timeline.records, "t"), (run.metrics.records, "time"), (run.evaluations.records, "when")
    times = (number(record, field) for records, field in files for record in records[place])
    return [time for time in times if not math.isnan(time)]


def curves_beside(
    shown: RecordedCurves, others: Sequence[RecordedCurves], names: Sequence[str], points: int
) -> SeriesAnswer:
    """Return the named curves of a run, with those of other runs beside."""
    beside = tuple(
        BesideCurves(
            run=other.run if other.run != shown.run else other.folder,
            begin_time=other.begin_time,
            series=other.curves.answer(names, points).series,
        )
        for other in others
    )
    return shown.curves.answer(names, points).model_copy(update={"begin_time": shown.begin_time, "beside": beside})


def recorded_evaluations(run: RecordedRun) -> list[EvaluationView]:
    """Return the newest evaluation of every version, by version."""
    found = {
        point.policy_version: EvaluationView(
            policy_version=point.policy_version,
            mean=point.mean,
            standard_error=point.standard_error,
            sample_count=point.n,
            time=point.when,
        )
        for point in Evaluation.read(run.evaluations.records)
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


def mesh_history(run: RecordedRun) -> MeshHistory | None:
    """Return running calls by version and the queue over the whole run; None with fewer than two moments."""
    timeline = timeline_series(run.timeline.records)
    if len(timeline) < 2:
        return None

    def means(values: FloatArray) -> FloatArray:
        return np.asarray(binned(timeline.time, np.nan_to_num(values), _MOST_MOMENTS)[1].round(2), np.float64)

    running = []
    for version, calls in zip(timeline.versions, means(timeline.running), strict=True):
        used = np.flatnonzero(calls)
        if len(used):
            first, last = int(used[0]), int(used[-1])
            running.append(VersionCalls(policy_version=version, first=first, calls=calls[first : last + 1].tolist()))
    return MeshHistory(
        time=means(timeline.time).tolist(),
        slots=means(timeline.slots).tolist(),
        running=running,
        trajectories={s: means(timeline.queue[s]).tolist() for s in _STATES if np.nansum(timeline.queue[s])},
        groups={state.removesuffix("_groups"): means(found).tolist() for state, found in timeline.groups.items()},
    )


def _throughput(run: RecordedRun) -> Iterator[Series]:
    """Yield the tokens that were generated and trained per second of wall time, without the pauses of the run."""
    timeline = timeline_series(run.timeline.records)
    train = train_series(run.metrics.records, run.timeline.records)
    known = ~np.isnan(train["time"])
    trained = np.cumsum(np.nan_to_num(train["batch.trained_tokens"]))[known]
    for name, time, total, pauses in (
        ("generated_tokens_per_second", timeline.time, timeline.generated_tokens, timeline.pauses),
        ("trained_tokens_per_second", train["time"][known], trained, train.pauses),
    ):
        moments, per_second = rate(*broken(*binned(time, total, _MOST_RATES), pauses))
        usable = ~np.isnan(per_second)
        yield _series(name, "tokens/s", "time", moments[usable], per_second[usable])


def _lives(run: RecordedRun) -> Iterator[Series]:
    """Yield the seconds from the copy of a version's weights until it is announced and served."""
    lives = version_lives(run.logs())
    for event in ("announced", "first_served", "last_served"):
        points = {life.policy_version: seconds for life in lives if (seconds := getattr(life, event)) is not None}
        x, y = np.array(list(points), np.float64), np.array(list(points.values()), np.float64)
        yield _series(f"version_{event}", "seconds", "policy_version", x, y)


def _series(name: str, unit: str, axis: Literal["time", "policy_version"], x: FloatArray, values: FloatArray) -> Series:
    mean = values.tolist()
    return Series(name=name, unit=unit, axis=axis, x=x.tolist(), mean=mean, low=mean, high=mean)
