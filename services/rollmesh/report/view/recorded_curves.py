"""Curves, evaluations and policies of a recorded run, as the gateway shows those of a live one."""

from __future__ import annotations

import math

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.models.items import PolicyView
from rollmesh.gateway.models.live import EvaluationView
from rollmesh.gateway.timeline_file import TimelineFile
from rollmesh.report.recorded_run import RecordedRun
from rollmesh.report.series import evaluation_points, newest_per_step, number


def recorded_curves(run: RecordedRun) -> tuple[Curves, TimelineFile]:
    """Return all curves of the run, and the reader of its timeline, which knows its begin."""
    curves, timeline = Curves(), TimelineFile()
    for record in newest_per_step(run.metrics.records):
        curves.add_report(record)
    for record in run.timeline.records:
        timeline.add(record, curves)
    curves.set_evaluations(recorded_evaluations(run))
    return curves, timeline


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
    """Return the policies of the step reports and of the evaluations, newest first."""
    evaluations = {point.policy_version: point for point in recorded_evaluations(run)}
    steps: dict[int, int] = {0: 0} if run.metrics.records else {}
    for record in run.metrics.records:
        version, step = number(record, "policy_version"), number(record, "train_step")
        if not math.isnan(version + step):
            steps[int(version)] = int(step)
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
