"""Trace spans of a leased trajectory.

The root span lasts from the first lease to the outcome. The worker that records the outcome sends it, so the trace has
its root even if earlier workers were killed. Each lease is an ``attempt`` span under it.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.runtime.logging import lines_about
from rollmesh.runtime.tracing import tracer
from rollmesh.worker.active_trajectory import ActiveTrajectory


@contextmanager
def attempt_on(active: ActiveTrajectory) -> Iterator[None]:
    """Open the span of one lease and add the trajectory's id to the log lines within it."""
    span = tracer().span(
        "attempt",
        active.trajectory.traceparent,
        trajectory=active.trajectory_id,
        attempt=active.attempt,
        resumed_tokens=active.saved_token_count,
    )
    active.span = span
    with lines_about(active.trajectory_id), span:
        yield


def end_of_trajectory(active: ActiveTrajectory, outcome: str, reward: float) -> None:
    """Send the root span, with the outcome of the trajectory."""
    if not tracer().on:
        return
    trajectory = active.trajectory
    start_ns = min(int(active.first_lease_time * 1e9), time.time_ns()) if active.first_lease_time else None
    tracer().span(
        "trajectory",
        trajectory.traceparent,
        root=True,
        start_ns=start_ns,
        trajectory=trajectory.trajectory_id,
        group=trajectory.group_id,
        birth_version=trajectory.birth_version,
        newest_version=active.newest_version,
        tokens=active.token_count,
        finish_reason=active.finish_reason.value if active.finish_reason is not None else "",
        outcome=outcome,
        reward=reward,
    ).end()
