"""Curves of a run: per train step (trainer reports), per version (evaluations) and over time (polls of the mesh)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rollmesh.gateway.models.live import EvaluationView, Series, SeriesAnswer, StalenessBin, StepReportView
from rollmesh.gateway.thinning import Curve
from rollmesh.runtime.request_guard import BadRequest
from rollmesh.step_metrics import Pace, curves, lookup, number

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
        return SeriesAnswer(available=list(self._names), series=self._all_series(wanted, points))

    def _all_series(self, names: Sequence[str], points: int) -> list[Series]:
        times = self._times.points(len(self._times)) if any(name in self._metrics for name in names) else []
        known = [point.x for point in times], [point.mean for point in times]
        return [self._series(name, points, *known) for name in names]

    def _series(self, name: str, points: int, steps: Sequence[float], times: Sequence[float]) -> Series:
        if name in self._recorded:
            return self._recorded[name]
        if name == EVALUATION:
            return _evaluation_series(self._evaluations, points)
        if name in self._metrics:
            found = _series(name, self._metrics[name].unit, "train_step", self._reported[name], points)
            return found.model_copy(update={"times": _times_of(found.x, steps, times)})
        return _series(name, _LIVE[name], "time", self._live[name], points)


def _times_of(wanted: Sequence[float], steps: Sequence[float], times: Sequence[float]) -> tuple[float, ...]:
    """Return the times of the wanted steps, from the known ones; none without a known one."""
    return tuple(round(float(time), 3) for time in np.interp(wanted, steps, times)) if steps else ()


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
