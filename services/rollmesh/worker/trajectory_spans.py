"""The spans of a trajectory while a worker holds it.

The root span, from the first lease to the outcome, is sent by the worker that records the outcome: whoever was killed
before, the trace has its root then. Each lease is an ``attempt`` under it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.runtime.logging import lines_about
from rollmesh.runtime.tracing import tracer
from rollmesh.worker.active_trajectory import ActiveTrajectory


@contextmanager
def attempt_on(held: ActiveTrajectory) -> Iterator[None]:
    """The span of one lease, and the trajectory's name on the lines that are logged meanwhile."""
    span = tracer().span(
        "attempt",
        held.trajectory.traceparent,
        trajectory=held.trajectory_id,
        attempt=held.attempt,
        resumed_tokens=held.saved_token_count,
    )
    held.span = span
    with lines_about(held.trajectory_id), span:
        yield


def end_of_trajectory(held: ActiveTrajectory, outcome: str, reward: float) -> None:
    """Send the root span: what became of the trajectory."""
    if not tracer().on:
        return
    trajectory = held.trajectory
    start_ns = min(int(held.first_lease_time * 1e9), time.time_ns()) if held.first_lease_time else None
    tracer().span(
        "trajectory",
        trajectory.traceparent,
        root=True,
        start_ns=start_ns,
        trajectory=trajectory.trajectory_id,
        group=trajectory.group_id,
        birth_version=trajectory.birth_version,
        newest_version=held.newest_version,
        tokens=held.token_count,
        finish_reason=held.finish_reason.value if held.finish_reason is not None else "",
        outcome=outcome,
        reward=reward,
    ).end()
