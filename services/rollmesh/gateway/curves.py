"""Curves of a run: per train step (trainer reports), per version (evaluations) and over time (polls of the mesh)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rollmesh.gateway.models import EvaluationView, Series, SeriesAnswer, StalenessBin, StepReportView
from rollmesh.gateway.thinning import Curve
from rollmesh.runtime.api_errors import BadRequest


class _Reported(NamedTuple):
    path: tuple[str, ...]
    unit: str


_REPORTED = {
    "reward_mean": _Reported(("reward_mean",), "reward"),
    "outcome_mean": _Reported(("batch", "outcome_mean"), "reward"),
    "response_length_mean": _Reported(("response_length_mean",), "tokens"),
    "staleness_mean": _Reported(("staleness_mean",), "train steps"),
    "off_policy_token_share": _Reported(("off_policy_token_share",), "ratio"),
    "truncated_share": _Reported(("batch", "truncated_share"), "ratio"),
    "masked_share": _Reported(("batch", "masked_fraction"), "ratio"),
    "loss": _Reported(("loss",), "loss"),
    "grad_norm": _Reported(("grad_norm",), "norm"),
    "learning_rate": _Reported(("learning_rate",), "rate"),
    "entropy": _Reported(("policy", "entropy"), "nats"),
    "kl_behavior": _Reported(("policy", "kl_behavior_k3"), "nats"),
    "ratio_mean": _Reported(("policy", "ratio", "mean"), "ratio"),
    "effective_sample_share": _Reported(("policy", "effective_sample_share"), "ratio"),
    "logprob_gap": _Reported(("policy", "logprob_gap_pure", "mean"), "nats"),
    "goodput": _Reported(("mesh", "goodput"), "ratio"),
    "trainer_wait": _Reported(("wait_seconds",), "seconds"),
}
_LIVE = {
    "tokens_per_second": "tokens/s",
    "finished_per_second": "trajectories/s",
    "in_flight": "trajectories",
    "ready_groups": "groups",
    "memory_ratio": "ratio",
}
EVALUATION = "evaluation"
NAMES = (*_REPORTED, EVALUATION, *_LIVE)
"""Names of all curves."""


class Curves:
    """All curves of one run, in bounded memory."""

    def __init__(self) -> None:
        self._reported = {name: Curve() for name in _REPORTED}
        self._live = {name: Curve() for name in _LIVE}
        self._evaluations: Sequence[EvaluationView] = ()
        self.report: StepReportView | None = None
        """Newest step report."""
        self.trained_staleness: list[StalenessBin] = []
        """Staleness of the trajectories of the newest step."""

    def add_report(self, record: Mapping[str, Any]) -> bool:
        """Add one step report, from ``metrics.jsonl`` or the queue; False if it has no train step."""
        step = _number(record, ("train_step",))
        if step is None:
            return False
        for name, reported in _REPORTED.items():
            value = _number(record, reported.path)
            if value is not None:
                self._reported[name].add(step, value)
        self.report = _step_report(record, int(step))
        self.trained_staleness = _staleness(record)
        return True

    def remove_reports(self, from_step: int) -> None:
        """Remove the reports of a step and all later ones; the trainer writes them again."""
        for curve in self._reported.values():
            curve.remove_from(from_step)
        if self.report is not None and self.report.train_step >= from_step:
            self.report, self.trained_staleness = None, []

    def add_poll(self, time: float, values: Mapping[str, float]) -> None:
        """Add the values of one poll of the mesh, by curve name."""
        for name, value in values.items():
            self._live[name].add(time, value)

    def set_evaluations(self, points: Sequence[EvaluationView]) -> None:
        """Set all finished evaluations, by version."""
        self._evaluations = points

    def answer(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return the named curves, or all if ``names`` is empty; BadRequest for an unknown name."""
        unknown = [name for name in names if name not in NAMES]
        if unknown:
            raise BadRequest(f"no curve {unknown[0]!r}", field="names", hint=f"one of {', '.join(NAMES)}")
        wanted = list(dict.fromkeys(names)) or list(NAMES)
        return SeriesAnswer(available=list(NAMES), series=[self._series(name, points) for name in wanted])

    def _series(self, name: str, points: int) -> Series:
        if name == EVALUATION:
            return _evaluation_series(self._evaluations, points)
        if name in _REPORTED:
            return _series(name, _REPORTED[name].unit, "train_step", self._reported[name], points)
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
        mean=[point.mean for point in shown],
        low=[point.mean - point.standard_error for point in shown],
        high=[point.mean + point.standard_error for point in shown],
    )


def _step_report(record: Mapping[str, Any], step: int) -> StepReportView:
    phases = record.get("seconds")
    spent = [value for value in phases.values() if isinstance(value, int | float)] if isinstance(phases, dict) else []
    return StepReportView(
        train_step=step,
        time=_number(record, ("time",)) or 0.0,
        reward_mean=_number(record, ("reward_mean",)),
        response_length_mean=_number(record, ("response_length_mean",)),
        staleness_mean=_number(record, ("staleness_mean",)),
        off_policy_token_share=_number(record, ("off_policy_token_share",)),
        seconds=float(sum(spent)) if spent else None,
        wait_seconds=_number(record, ("wait_seconds",)),
    )


def _staleness(record: Mapping[str, Any]) -> list[StalenessBin]:
    found = _inner(record, ("batch", "trajectory_staleness", "histogram"))
    if not isinstance(found, dict):
        return []
    bins = {int(steps): int(count) for steps, count in found.items() if str(steps).lstrip("-").isdecimal()}
    return [StalenessBin(staleness=steps, count=count) for steps, count in sorted(bins.items())]


def _inner(record: Mapping[str, Any], path: Sequence[str]) -> Any:
    value: Any = record
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _number(record: Mapping[str, Any], path: Sequence[str]) -> float | None:
    """Return a finite number of a record, or None."""
    value = _inner(record, path)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)
