"""What a reward service exports."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rollmesh.reward.pool.isolation import IsolationLevel
from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics
from rollmesh.types import OutcomeKind, RewardOutcome

_REPLACED = ("timed_out", "died", "retired")
_FINE_BUCKETS = (0.0001, 0.00025, 0.0005, *LATENCY_BUCKETS)


class RewardMetrics:
    """Counters of one reward service; implements the pool's observer."""

    def __init__(self, metrics: Metrics) -> None:
        self._items = metrics.gauge("rollmesh_reward_items", "Answers in the service, by state.", ("state",))
        self._waiting = self._items.labels(state="waiting")
        self.running = self._items.labels(state="running")
        """Answers received and not yet answered, the waiting ones included."""
        self.received = metrics.counter("rollmesh_reward_answers_total", "Answers received.")
        self.workers = metrics.gauge("rollmesh_reward_workers", "Verifier processes: answers scored at once.")
        self._queue_seconds = metrics.histogram(
            "rollmesh_reward_queue_seconds", "Wait of an answer for a worker process.", _FINE_BUCKETS
        )
        self._score_seconds = metrics.histogram(
            "rollmesh_reward_score_seconds", "From receipt to outcome, by verifier.", _FINE_BUCKETS, ("verifier",)
        )
        self._outcomes = metrics.counter(
            "rollmesh_reward_outcomes_total", "Outcomes by verifier and kind.", ("verifier", "kind")
        )
        self._wrong_by_timeout = metrics.counter(
            "rollmesh_reward_timeouts_scored_wrong_total", "Time-outs that their verifier counts as a wrong answer."
        )
        self._replaced = metrics.counter(
            "rollmesh_reward_workers_replaced_total", "Worker processes replaced, by reason.", ("reason",)
        )
        self._isolation = metrics.gauge(
            "rollmesh_reward_isolation_enforced", "Measured at the start: 1 if the property holds.", ("property",)
        )
        self._last = metrics.gauge(
            "rollmesh_reward_last_outcome_timestamp_seconds", "Unix time of the newest outcome; 0 before the first."
        )
        for reason in _REPLACED:
            self._replaced.labels(reason=reason)

    def expect(self, verifiers: Iterable[str]) -> None:
        """Create the series of these verifiers at 0."""
        for verifier in verifiers:
            self._score_seconds.labels(verifier=verifier)
            for kind in OutcomeKind:
                self._outcomes.labels(verifier=verifier, kind=kind.value)

    def queued(self, waiting: int) -> None:
        """So many answers wait for a worker."""
        self._waiting.set(waiting)

    def started(self, queue_seconds: float) -> None:
        """An answer left the queue."""
        self._queue_seconds.observe(queue_seconds)

    def replaced(self, reason: str) -> None:
        """A worker is gone."""
        self._replaced.labels(reason=reason).inc()

    def scored(self, verifier: str, outcome: RewardOutcome, seconds: float) -> None:
        """An outcome leaves the service."""
        self._score_seconds.labels(verifier=verifier).observe(seconds)
        self._outcomes.labels(verifier=verifier, kind=outcome.kind.value).inc()
        if outcome.kind is OutcomeKind.SCORED and outcome.message:
            self._wrong_by_timeout.inc()
        self._last.set(time.time())

    def isolated(self, level: IsolationLevel) -> None:
        """The measured level of isolation."""
        for name, value in level.properties().items():
            self._isolation.labels(property=name).set(int(value))
