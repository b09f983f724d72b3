"""Prometheus metrics of a reward service."""

import time
from collections.abc import Iterable, Mapping

from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics
from rollmesh.types import OutcomeKind, RewardOutcome

_REPLACED = ("timed_out", "died", "retired")
_FINE_BUCKETS = (0.0001, 0.00025, 0.0005, *LATENCY_BUCKETS)


class RewardMetrics:
    """Counters of one reward service; the pool updates a part of them."""

    def __init__(self, metrics: Metrics) -> None:
        self._items = metrics.gauge("rollmesh_reward_items", "Answers in the service, by state.", ("state",))
        self.waiting = self._items.labels(state="waiting")
        self.running = self._items.labels(state="running")
        """Answers received without an outcome yet, including waiting ones."""
        self.received = metrics.counter("rollmesh_reward_answers_total", "Answers received.")
        self.workers = metrics.gauge("rollmesh_reward_workers", "Verifier processes: answers scored at once.")
        self.queue_seconds = metrics.histogram(
            "rollmesh_reward_queue_seconds", "Wait of an answer for a worker process.", _FINE_BUCKETS
        )
        self._score_seconds = metrics.histogram(
            "rollmesh_reward_score_seconds", "Time from receipt to outcome, by verifier.", _FINE_BUCKETS, ("verifier",)
        )
        self._outcomes = metrics.counter(
            "rollmesh_reward_outcomes_total", "Outcomes by verifier and kind.", ("verifier", "kind")
        )
        self._wrong_by_timeout = metrics.counter(
            "rollmesh_reward_timeouts_scored_wrong_total", "Time-outs scored as a wrong answer by their verifier."
        )
        self.replaced = metrics.counter(
            "rollmesh_reward_workers_replaced_total", "Worker processes replaced, by reason.", {"reason": _REPLACED}
        )
        self._isolation = metrics.gauge(
            "rollmesh_reward_isolation_enforced", "1 if the property held when measured at startup.", ("property",)
        )
        self._last = metrics.gauge(
            "rollmesh_reward_last_outcome_timestamp_seconds", "Unix time of the newest outcome; 0 before the first."
        )

    def expect(self, verifiers: Iterable[str]) -> None:
        for verifier in verifiers:
            self._score_seconds.labels(verifier=verifier)
            for kind in OutcomeKind:
                self._outcomes.labels(verifier=verifier, kind=kind.value)

    def scored(self, verifier: str, outcome: RewardOutcome, seconds: float) -> None:
        self._score_seconds.labels(verifier=verifier).observe(seconds)
        self._outcomes.labels(verifier=verifier, kind=outcome.kind.value).inc()
        if outcome.kind is OutcomeKind.SCORED and outcome.message:
            self._wrong_by_timeout.inc()
        self._last.set(time.time())

    def isolated(self, properties: Mapping[str, bool]) -> None:
        for name, value in properties.items():
            self._isolation.labels(property=name).set(int(value))
