"""Spans of a train step, in its own trace and in the traces of its trajectories."""

from __future__ import annotations

from rollmesh.runtime.spans import Span
from rollmesh.runtime.tracing import tracer
from rollmesh.trainer.service.batch_source import ClaimedBatch
from rollmesh.types import Trajectory

MAX_TRAJECTORIES = 512
"""Maximum number of trajectories of one step with their own span; a span costs about 30 microseconds."""


def step_span(claimed: ClaimedBatch) -> Span:
    """Start the root span of the train step, linked to its trajectories.

    A replay starts a child span, because the first training of the step has already sent the root.
    """
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
