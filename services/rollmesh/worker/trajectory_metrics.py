"""What a process that holds trajectories counts; the services name their own metrics."""

from __future__ import annotations

from typing import Protocol

from prometheus_client import Counter


class TrajectoryMetrics(Protocol):
    """Counters of calls and sessions."""

    evaluation_tokens: Counter
    """Tokens sampled by calls that are pinned to one policy version."""
    sessions_lost: Counter
    """Worker sessions that expired."""

    def sampled(self, count: int, age: int) -> None:
        """``count`` tokens arrived from a version ``age`` announcements old."""

    def call_ended(self, reason: str) -> None:
        """A generation call ended."""

    def fruitless_call(self) -> None:
        """A call was given up without a token."""
