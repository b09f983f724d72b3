"""How the calls of a process to the store go, for its ``/metrics``."""

from __future__ import annotations

from typing import Protocol

from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics

_BUCKETS = (0.00025, 0.0005, *LATENCY_BUCKETS)


class CallObserver(Protocol):
    """Hears how calls to the store end."""

    def answered(self, seconds: float) -> None:
        """A call was answered, so many seconds after it began, tries before it included."""

    def failed(self) -> None:
        """A try got no answer, or the server could not carry it out."""


class StoreCallMetrics:
    """Counts the store calls of one service."""

    def __init__(self, metrics: Metrics) -> None:
        service = metrics.component
        self._seconds = metrics.histogram(
            f"rollmesh_{service}_store_call_seconds", "Calls to the store until their answer, tries included.", _BUCKETS
        )
        self._failures = metrics.counter(
            f"rollmesh_{service}_store_call_failures_total", "Tries of store calls that got no answer or no room."
        )

    def answered(self, seconds: float) -> None:
        """A call was answered."""
        self._seconds.observe(seconds)

    def failed(self) -> None:
        """A try failed."""
        self._failures.inc()
