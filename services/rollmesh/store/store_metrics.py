"""Observers of the store calls of a process: what they wait for, and their Prometheus metrics."""

from __future__ import annotations

from rollmesh.runtime.health import Waits
from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics

_BUCKETS = (0.00025, 0.0005, *LATENCY_BUCKETS)
_OPERATION = "Redis"


class StoreCallWaits:
    """Observer that shows the last error of Redis among the waits of the process, until Redis answers."""

    def __init__(self, waits: Waits) -> None:
        self._waits = waits

    def answered(self, seconds: float) -> None:
        """Record an answered call and its duration, failed attempts included."""
        del seconds
        self._waits.end(_OPERATION)

    def late(self, reason: str) -> None:
        """Show an attempt that has no answer yet."""
        self._waits.begin(_OPERATION, f"Redis: {reason}")

    def failed(self, reason: str) -> None:
        """Record an attempt without an answer, or one that the server could not execute."""
        self.late(reason)


class StoreCallMetrics(StoreCallWaits):
    """Store call metrics of one service."""

    def __init__(self, metrics: Metrics, waits: Waits) -> None:
        super().__init__(waits)
        service = metrics.component
        self._seconds = metrics.histogram(
            f"rollmesh_{service}_store_call_seconds", "Duration of store calls, retries included.", _BUCKETS
        )
        self._failures = metrics.counter(
            f"rollmesh_{service}_store_call_failures_total",
            "Attempts of store calls that got no answer or that the server could not execute.",
        )

    def answered(self, seconds: float) -> None:
        """Record an answered call and its duration, failed attempts included."""
        super().answered(seconds)
        self._seconds.observe(seconds)

    def failed(self, reason: str) -> None:
        """Record an attempt without an answer, or one that the server could not execute."""
        super().failed(reason)
        self._failures.inc()
