"""Prometheus metrics of a teacher service."""

from __future__ import annotations

import time

from rollmesh.runtime.metrics import Metrics


class TeacherMetrics:
    """Counters of one process of a teacher."""

    def __init__(self, metrics: Metrics, teacher: str) -> None:
        labels = {"teacher": (teacher,)}
        self.running = metrics.gauge(
            "rollmesh_teacher_running_sequences",
            "Sequences received and not scored yet, waiting ones included.",
            labels,
        ).labels(teacher)
        self.received = metrics.counter("rollmesh_teacher_sequences_total", "Sequences received.", labels).labels(
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

    def scored(self, tokens: int, context_tokens: int, seconds: float) -> None:
        self._tokens.inc(tokens)
        self._context_tokens.inc(context_tokens)
        self._seconds.observe(seconds)
        self._last.set(time.time())
