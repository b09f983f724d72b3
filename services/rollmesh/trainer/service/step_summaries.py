"""Traces of a train step outside the run folder: its summary in the queue, and its spans."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.runtime.spans import Span
from rollmesh.runtime.tracing import tracer
from rollmesh.step_metrics import curves, lookup
from rollmesh.store import KEPT_REPORTS
from rollmesh.trainer.service.batch_source import ClaimedBatch
from rollmesh.trainer.service.run_log import StepRecords, finite
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Trajectory

_SHOWN = ("train_step", "time", "seconds", "batch.trajectory_staleness.histogram")
"""Fields that the gateway shows in addition to the curves."""


def reported(record: Mapping[str, Any]) -> dict[str, Any]:
    """Select the fields of a line of metrics.jsonl that the queue stores, with the same nesting."""
    kept: dict[str, Any] = {}
    for path in (*_SHOWN, *(path for metric in curves().values() for path in metric.paths)):
        if (value := lookup(record, path)) is not None:
            *folders, name = path.split(".")
            inner = kept
            for key in folders:
                inner = inner.setdefault(key, {})
            inner[name] = finite(value)
    return kept


@dataclass(eq=False)
class StepSummaries:
    """Copy of the run folder's reports in the queue, kept up to date."""

    _session: TrainingSession
    _records: StepRecords
    _assertions: int = field(default=0, init=False)

    async def restore(self, train_step: int) -> None:
        """Drop the reports of later steps, and restore those from the run folder that the queue may have lost."""
        # Read before the work: if Redis restarts meanwhile, the next report restores again.
        self._assertions = self._session.assertions
        found = [reported(line) for line in await asyncio.to_thread(self._records.newest, KEPT_REPORTS, train_step)]
        after = found[0]["train_step"] - 1 if found and found[-1]["train_step"] == train_step else train_step
        await self._write(after, found if after < train_step else [])

    async def restore_if_lost(self, train_step: int) -> None:
        """Call ``restore`` if Redis restarted since the last one."""
        if self._session.assertions != self._assertions:
            await self.restore(train_step)

    async def add(self, record: Mapping[str, Any]) -> None:
        """Add the report of a step and drop its older report and all later ones. Raises SessionLost when fenced."""
        step = int(record["train_step"])
        await self.restore_if_lost(step - 1)
        await self._write(step - 1, [reported(record)])

    async def _write(self, after: int, records: list[dict[str, Any]]) -> None:
        session = self._session
        await session.retry("report_steps", lambda: session.store.step_reports.write(session.token, after, records))


MAX_TRAJECTORIES = 512
"""Maximum number of trajectories of one step with their own span; a span costs about 30 microseconds."""


def step_span(claimed: ClaimedBatch) -> Span:
    """Start the root span of the train step, linked to its trajectories; a child of the first one for a replay."""
    step = claimed.batch.train_step
    return tracer().span(
        "train_step",
        tracer().train_step(step),
        root=not claimed.replayed,
        links=[t.traceparent for t in _trajectories(claimed)] if tracer().on else (),
        train_step=step,
        replayed=claimed.replayed,
        groups=len(claimed.batch.groups),
    )


def mark_trained(claimed: ClaimedBatch, started_ns: int) -> None:
    """Add a span from ``started_ns`` to now to the trace of each trajectory, with the train step."""
    if not tracer().on:
        return
    step = claimed.batch.train_step
    traceparent = tracer().train_step(step)
    for trajectory in _trajectories(claimed)[:MAX_TRAJECTORIES]:
        versions = trajectory.policy_versions
        tracer().span(
            "train",
            trajectory.traceparent,
            kind="consumer",
            links=[traceparent],
            start_ns=started_ns,
            trajectory=trajectory.trajectory_id,
            train_step=step,
            policy_versions=versions,
            replayed=claimed.replayed,
        ).end()


def _trajectories(claimed: ClaimedBatch) -> list[Trajectory]:
    return [trajectory for group in claimed.batch.groups for trajectory in group.trajectories]
