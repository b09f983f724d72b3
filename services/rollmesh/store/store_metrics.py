"""Prometheus metrics of the store calls of a process."""

from __future__ import annotations

from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics

_BUCKETS = (0.00025, 0.0005, *LATENCY_BUCKETS)


class StoreCallMetrics:
    """Store call metrics of one service."""

    def __init__(self, metrics: Metrics) -> None:
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
        self._seconds.observe(seconds)

    def failed(self) -> None:
        """Record an attempt without an answer, or one that the server could not execute."""
        self._failures.inc()
