"""Curves of a run in bounded memory: per train step (trainer reports), version (evaluations), and poll of the mesh."""

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, Literal

import numpy as np

from rollmesh.gateway.models.live import EvaluationView, Series, SeriesAnswer, StalenessBin, StepReportView
from rollmesh.runtime.request_guard import BadRequest
from rollmesh.step_metrics import Pace, RateWindow, curves, lookup, number

MOST_POINTS = 4096


@dataclass(slots=True)
class CurveRange:
    """Aggregate of the values in one range of x."""

    first: float
    last: float
    total: float
    low: float
    high: float
    count: int = 1

    def merged(self, other: "CurveRange") -> "CurveRange":
        """Return both ranges merged; ``other`` is the later one."""
        return CurveRange(
            first=self.first,
            last=other.last,
            total=self.total + other.total,
            low=min(self.low, other.low),
            high=max(self.high, other.high),
            count=self.count + other.count,
        )

    @property
    def x(self) -> float:
        """Middle of the range."""
        return (self.first + self.last) / 2

    @property
    def mean(self) -> float:
        """Mean of the values."""
        return self.total / self.count


@dataclass(slots=True)
class Curve:
    """Points by ascending x, each with about the same number of values."""

    most_points: int = MOST_POINTS
    _points: list[CurveRange] = field(default_factory=list)
    _values_per_point: int = 1

    def __len__(self) -> int:
        return len(self._points)

    def add(self, x: float, value: float) -> None:
        """Add a value.

        If ``x`` is not beyond the last x, the values from ``x`` on are replaced: a restarted trainer repeats steps.
        """
        if self._points and x <= self._points[-1].last:
            self.remove_from(x)
        point = CurveRange(first=x, last=x, total=value, low=value, high=value)
        if self._points and self._points[-1].count < self._values_per_point:
            self._points[-1] = self._points[-1].merged(point)
            return
        self._points.append(point)
        if len(self._points) > self.most_points:
            self._values_per_point *= 2
            self._points = _merged(self._points, 2)

    def points(self, most: int) -> list[CurveRange]:
        """Return at most ``most`` points over the whole curve."""
        return _merged(self._points, -(-len(self._points) // most)) if len(self._points) > most else list(self._points)

    def remove_from(self, x: float) -> None:
        """Remove the values at ``x`` and beyond, and the values merged with them."""
        self._points = self._points[: bisect_left([point.last for point in self._points], x)]


def _merged(points: Sequence[CurveRange], size: int) -> list[CurveRange]:
    """Merge every ``size`` neighbors into one point."""
    return [reduce(CurveRange.merged, points[at : at + size]) for at in range(0, len(points), size)]


_LIVE = {
    "tokens_per_second": "tokens/s",
    "finished_per_second": "trajectories/s",
    "in_flight": "trajectories",
    "ready_groups": "groups",
    "memory_ratio": "ratio",
}
EVALUATION = "evaluation"
CURVES = (*curves(), EVALUATION, *_LIVE)
"""Names of all curves."""
NAMES_PATTERN = "^ *({name} *(, *{name} *)*)?$".format(name=f"({'|'.join(CURVES)})")
"""Form of a list of names, which ``names_of`` reads."""


def names_of(text: str) -> list[str]:
    """Return the names of a comma-separated list with optional spaces; none for an empty list."""
    return [name.strip(" ") for name in text.split(",")] if text.strip(" ") else []


class Curves:
    """All curves of one run, in bounded memory."""

    def __init__(self) -> None:
        self._metrics = curves()
        self._reported = {name: Curve() for name in self._metrics}
        self._live = {name: Curve() for name in _LIVE}
        self._recorded: dict[str, Series] = {}
        self._names = (*self._metrics, EVALUATION, *_LIVE)
        self._times = Curve()
        self.pace = Pace()
        """Pace of the newest train steps."""
        self._evaluations: Sequence[EvaluationView] = ()
        self.report: StepReportView | None = None
        """Newest step report."""
        self.trained_staleness: list[StalenessBin] = []
        """Staleness of the trajectories of the newest step."""

    def add_report(self, record: Mapping[str, Any]) -> bool:
        """Add one step report, from ``metrics.jsonl`` or the queue; False if it has no train step."""
        step = _number(record, "train_step")
        if step is None:
            return False
        for name, metric in self._metrics.items():
            value = metric.value(record)
            if math.isfinite(value):
                self._reported[name].add(step, value)
        if (time := _number(record, "time")) is not None:
            self._times.add(step, time)
            self.pace.add(int(step), time)
        self.report = _step_report(record, int(step))
        self.trained_staleness = _staleness(record)
        return True

    def remove_reports(self, from_step: int) -> None:
        """Remove the reports of a step and all later ones; the trainer writes them again."""
        for curve in (*self._reported.values(), self._times):
            curve.remove_from(from_step)
        self.pace.remove(from_step)
        if self.report is not None and self.report.train_step >= from_step:
            self.report, self.trained_staleness = None, []

    def add_poll(self, time: float, values: Mapping[str, float]) -> None:
        """Add the values of one poll of the mesh, by curve name."""
        for name, value in values.items():
            self._live[name].add(time, value)

    def set_evaluations(self, points: Sequence[EvaluationView]) -> None:
        """Set all finished evaluations, by version."""
        self._evaluations = points

    def add_series(self, series: Series) -> None:
        """Add a curve that only the folder of an ended run has."""
        self._recorded[series.name] = series
        self._names = (*self._names, series.name)

    def answer(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return the named curves, or all if ``names`` is empty; BadRequest for an unknown name."""
        unknown = [name for name in names if name not in self._names]
        if unknown:
            raise BadRequest(f"no curve {unknown[0]!r}", field="names", hint=f"one of {', '.join(self._names)}")
        wanted = list(dict.fromkeys(names)) or list(self._names)
        times = self._times.points(len(self._times)) if any(name in self._metrics for name in wanted) else []
        series = [self._series(name, points, times) for name in wanted]
        return SeriesAnswer(available=list(self._names), series=series)

    def _series(self, name: str, points: int, times: Sequence[CurveRange]) -> Series:
        if name in self._recorded:
            return self._recorded[name]
        if name == EVALUATION:
            return _evaluation_series(self._evaluations, points)
        if name in self._metrics:
            found = _series(name, self._metrics[name].unit, "train_step", self._reported[name], points)
            if not times:
                return found
            interpolated = np.interp(found.x, [point.x for point in times], [point.mean for point in times])
            return found.model_copy(update={"times": tuple(round(float(time), 3) for time in interpolated)})
        return _series(name, _LIVE[name], "time", self._live[name], points)


def _series(name: str, unit: str, axis: Literal["train_step", "time"], curve: Curve, points: int) -> Series:
    found = curve.points(points)
    return Series(
        name=name,
        unit=unit,
        axis=axis,
        x=[point.x for point in found],
        mean=[point.mean for point in found],
        low=[point.low for point in found],
        high=[point.high for point in found],
    )


def _evaluation_series(evaluations: Sequence[EvaluationView], points: int) -> Series:
    # Each point is a measurement with its own error: too many points are thinned out, never merged.
    every = -(-len(evaluations) // points) or 1
    shown = list(reversed(evaluations[::-1][::every]))
    return Series(
        name=EVALUATION,
        unit="score",
        axis="policy_version",
        x=[float(point.policy_version) for point in shown],
        times=tuple(point.time or 0.0 for point in shown) if all(point.time for point in shown) else (),
        mean=[point.mean for point in shown],
        low=[point.mean - (point.standard_error or 0.0) for point in shown],
        high=[point.mean + (point.standard_error or 0.0) for point in shown],
    )


def _step_report(record: Mapping[str, Any], step: int) -> StepReportView:
    phases = record.get("seconds")
    spent = [value for value in phases.values() if isinstance(value, int | float)] if isinstance(phases, dict) else []
    values = {name: _number(record, name) for name in StepReportView.model_fields}
    values |= {"time": values["time"] or 0.0, "seconds": float(sum(spent)) if spent else None}
    return StepReportView.model_validate(values | {"train_step": step})


def _staleness(record: Mapping[str, Any]) -> list[StalenessBin]:
    found = lookup(record, "batch.trajectory_staleness.histogram")
    if not isinstance(found, dict):
        return []
    bins = {int(steps): int(count) for steps, count in found.items() if str(steps).lstrip("-").isdecimal()}
    return [StalenessBin(staleness=steps, count=count) for steps, count in sorted(bins.items())]


def _number(record: Mapping[str, Any], field: str) -> float | None:
    """Return a finite number at the top level of a record, or None."""
    value = number(record, field)
    return value if math.isfinite(value) else None


LEAST_PAUSE_SECONDS = 15.0
"""Shortest time without a record that counts as a pause between two sessions of the run."""
_FIELDS = (("in_flight", "leased"), ("ready_groups", "ready_groups"), ("memory_ratio", "memory_ratio"))


class TimelineFile:
    """Reader of the records, in their order."""

    def __init__(self) -> None:
        self._rates = RateWindow()
        self.begin_time: float | None = None
        """Time of the first record of the run, later by the pauses between its sessions; None before it."""
        self._newest = 0.0

    def add(self, record: Mapping[str, Any], curves: Curves, before: float | None = None) -> None:
        """Add a record to the curves; with ``before`` only if it is older (a live gateway polls the rest itself)."""
        view = record.get("view")
        seconds, saved = record.get("t"), record.get("saved_token_total")
        if not isinstance(view, dict) or not isinstance(seconds, float) or not isinstance(saved, int):
            return
        if self.begin_time is None:
            self.begin_time = seconds
        elif (silent := seconds - self._newest) > LEAST_PAUSE_SECONDS:
            self.begin_time += silent
        self._newest = seconds
        if before is not None and seconds >= before:
            return
        values = {"tokens_per_second": self._rates.update(seconds, saved)[0]}
        for curve, name in _FIELDS:
            if isinstance(view.get(name), int | float):
                values[curve] = float(view[name])
        curves.add_poll(seconds, values)
