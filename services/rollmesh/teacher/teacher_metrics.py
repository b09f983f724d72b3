"""Prometheus metrics of a teacher service."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rollmesh.runtime.metrics import Metrics


class TeacherMetrics:
    """Counters of one process of a teacher."""

    def __init__(self, metrics: Metrics, teacher: str) -> None:
        labels = {"teacher": (teacher,)}
        self._count, self._changed = 0, time.monotonic()
        self._running = metrics.gauge(
            "rollmesh_teacher_running_sequences",
            "Sequences received and not scored yet, waiting ones included.",
            labels,
        ).labels(teacher)
        self._busy = metrics.counter(
            "rollmesh_teacher_busy_seconds_total", "Seconds with a sequence in the service.", labels
        ).labels(teacher)
        self._received = metrics.counter("rollmesh_teacher_sequences_total", "Sequences received.", labels).labels(
            teacher
        )
        self._tokens = metrics.counter(
            "rollmesh_teacher_scored_tokens_total", "Response tokens scored.", labels
        ).labels(teacher)
        self._context_tokens = metrics.counter(
            "rollmesh_teacher_context_tokens_total", "Tokens of prompt and response of the scored sequences.", labels
        ).labels(teacher)
        self._seconds = metrics.histogram(
            "rollmesh_teacher_score_seconds", "Time from receipt of a sequence to its scores.", labels=labels
        ).labels(teacher)
        self.errors = metrics.counter("rollmesh_teacher_errors_total", "Sequences without scores.", labels).labels(
            teacher
        )
        self._last = metrics.gauge(
            "rollmesh_teacher_last_score_timestamp_seconds",
            "Unix time of the newest scores; 0 before the first.",
            labels,
        ).labels(teacher)

    @contextmanager
    def sequence(self) -> Iterator[None]:
        """Count a sequence that is in the service during the block."""
        self._received.inc()
        self._add(1)
        try:
            yield
        finally:
            self._add(-1)

    def note_busy(self) -> None:
        """Count the busy seconds so far, which a long sequence would else show at its end only."""
        self._add(0)

    def _add(self, number: int) -> None:
        now = time.monotonic()
        if self._count:
            self._busy.inc(now - self._changed)
        self._count, self._changed = self._count + number, now
        self._running.set(self._count)

    def scored(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._context_tokens.inc(context_tokens)
        self._seconds.observe(seconds)
        self._last.set(time.time())
