"""Protocol of the counters of calls and sessions; each service names its own metrics."""

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
        """Count ``count`` tokens of a policy version that is ``age`` announcements old."""

    def call_ended(self, reason: str) -> None:
        """Count the end of a generation call."""

    def fruitless_call(self) -> None:
        """Count a call that failed without a token."""
