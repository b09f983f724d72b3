"""The spans of a train step, and the mark that it leaves in the traces of its trajectories."""

from __future__ import annotations

from rollmesh.runtime.spans import Span
from rollmesh.runtime.tracing import tracer
from rollmesh.trainer.service.batch_source import ClaimedBatch
from rollmesh.types import Trajectory

MOST_TRAJECTORIES = 512
"""Trajectories of one step that get a span of their own; the spans cost some 30 microseconds each."""


def step_span(claimed: ClaimedBatch) -> Span:
    """The root span of the train step, linked to the trajectories that it trains on.

    A replay happens under it: the first training of the step has sent the root already.
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
    """In the trace of each trajectory: from when until now, and in which step, it was trained on."""
    if not tracer().on:
        return
    step = claimed.batch.train_step
    home = tracer().train_step(step)
    for trajectory in _trajectories(claimed)[:MOST_TRAJECTORIES]:
        versions = trajectory.policy_versions
        tracer().span(
            "train",
            trajectory.traceparent,
            kind="consumer",
            links=[home],
            start_ns=started_ns,
            trajectory=trajectory.trajectory_id,
            train_step=step,
            policy_versions=versions,
            replayed=claimed.replayed,
        ).end()


def _trajectories(claimed: ClaimedBatch) -> list[Trajectory]:
    return [trajectory for group in claimed.batch.groups for trajectory in group.trajectories]
