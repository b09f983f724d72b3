"""Metrics of a worker, the same in every process that runs one, and the part that each caller of generators needs."""

from typing import Protocol

from prometheus_client import Counter

from rollmesh.runtime.metrics import LENGTH_BUCKETS, STALENESS_BUCKETS, Metrics
from rollmesh.store.queue_types import ReleaseReason

CALL_ENDS = (
    "stop",
    "length",
    "interrupted",
    "enough",
    "refused",
    "cut_off",
    "hung",
    "broken",
    "lengths",
    "too_many_tokens",
    "version",
    "token_id",
    "logprob",
    "finish_reason",
    "no_finish_reason",
)
_DROPS = ("taken_back", "dead", "failed", "unscorable")
_ENDS = ("stop", "length", "environment")
_OUTCOMES = ("scored", "timed_out", "verifier_error")


class TrajectoryMetrics(Protocol):
    """Counters of calls and sessions; each service names its own metrics."""

    evaluation_tokens: Counter
    """Tokens sampled by calls that are pinned to one policy version."""
    sessions_lost: Counter
    """Worker sessions that expired."""
    calls_ended: Counter
    """Generation calls, by the reason of their end."""
    fruitless_calls: Counter
    """Calls that failed without a token."""

    def sampled(self, count: int, age: int) -> None:
        """Count ``count`` tokens of a policy version that is ``age`` announcements old."""


class WorkerMetrics:
    """Counters of one worker: its calls, its trajectories and their ends.

    Their names start with the name of the rollout service in the agents service, too.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._count_calls(metrics)
        self._count_ends(metrics)
        self._count_work(metrics)
        self._count_evaluations(metrics)

    def _count_calls(self, metrics: Metrics) -> None:
        self._tokens = metrics.counter(
            "rollmesh_rollout_sampled_tokens_total",
            "Tokens kept for training, by age of their policy version on arrival.",
            {"age": (*map(str, range(4)), "4+")},
        )
        self.calls_ended = metrics.counter(
            "rollmesh_rollout_calls_ended_total", "Generation calls, by the reason of their end.", {"reason": CALL_ENDS}
        )
        self.fruitless_calls = metrics.counter(
            "rollmesh_rollout_calls_fruitless_total", "Generation calls that failed without a token."
        )

    def _count_ends(self, metrics: Metrics) -> None:
        self.drops = metrics.counter(
            "rollmesh_rollout_trajectories_dropped_total",
            "Trajectories this worker dropped, by reason.",
            {"reason": _DROPS},
        )
        self.parked = metrics.counter(
            "rollmesh_rollout_trajectories_parked_total",
            "Trajectories released unfinished, by reason.",
            {"reason": ReleaseReason},
        )
        self._finished = metrics.counter(
            "rollmesh_rollout_trajectories_finished_total",
            "Finished trajectories, by finish reason.",
            {"reason": _ENDS},
        )
        self._length = metrics.histogram(
            "rollmesh_rollout_response_tokens", "Tokens of finished responses.", buckets=LENGTH_BUCKETS
        )
        self._last_finished = metrics.gauge(
            "rollmesh_rollout_last_finished_timestamp_seconds", "Time of the last finished trajectory of this worker."
        )
        self._span = metrics.histogram(
            "rollmesh_rollout_version_span",
            "Newest minus oldest policy version of a response.",
            buckets=STALENESS_BUCKETS,
        )
        self._reward_seconds = metrics.histogram(
            "rollmesh_rollout_reward_seconds", "Time from the last token to the outcome, queueing included."
        )
        self.teacher_seconds = metrics.histogram(
            "rollmesh_rollout_teacher_seconds", "Time from the last token to the teacher's scores, queueing included."
        )
        self.teacher_failures = metrics.counter(
            "rollmesh_rollout_teacher_failures_total", "Trajectories that their teacher could not score."
        )
        self._outcomes = metrics.counter(
            "rollmesh_rollout_reward_outcomes_total", "Reward outcomes by kind.", {"kind": _OUTCOMES}
        )

    def _count_work(self, metrics: Metrics) -> None:
        self.leases = metrics.counter("rollmesh_rollout_leases_total", "Trajectories leased by this worker.")
        self.resumed = metrics.counter(
            "rollmesh_rollout_leases_resumed_total", "Leases that continue a partial trajectory."
        )
        self.restarted = metrics.counter(
            "rollmesh_rollout_trajectories_restarted_total",
            "Multi-turn trajectories restarted because their environment cannot be resumed.",
        )
        self.sessions_lost = metrics.counter("rollmesh_rollout_sessions_lost_total", "Worker sessions that expired.")
        self.in_flight = metrics.gauge(
            "rollmesh_rollout_in_flight_trajectories", "Unfinished trajectories leased by this worker."
        )
        self.awaiting_reward = metrics.gauge(
            "rollmesh_rollout_awaiting_reward_trajectories",
            "Finished trajectories of this worker that wait for an outcome.",
        )
        self.awaiting_generator = metrics.gauge(
            "rollmesh_rollout_awaiting_generator_trajectories", "Trajectories of this worker that wait for a generator."
        )
        self.generators_avoided = metrics.gauge(
            "rollmesh_rollout_generators_avoided", "Generators that this worker avoids after an error."
        )

    def _count_evaluations(self, metrics: Metrics) -> None:
        self.evaluation_tokens = metrics.counter(
            "rollmesh_rollout_evaluation_tokens_total", "Tokens sampled for evaluations."
        )
        self.evaluations_started = metrics.counter(
            "rollmesh_rollout_evaluations_started_total", "Evaluations claimed by this replica."
        )
        self.evaluations = metrics.counter(
            "rollmesh_rollout_evaluations_total", "Evaluations finished by this replica."
        )
        self.evaluations_given_up = metrics.counter(
            "rollmesh_rollout_evaluations_given_up_total",
            "Evaluations finished without a score: no generator served their version, or no agent came.",
        )
        self.last_evaluation = metrics.gauge(
            "rollmesh_rollout_last_evaluation_timestamp_seconds", "Time of the last evaluation of this replica."
        )

    def sampled(self, count: int, age: int) -> None:
        self._tokens.labels(age=str(age) if age < 4 else "4+").inc(count)

    def finished(self, reason: str, tokens: int, version_span: int) -> None:
        """Count a finished trajectory."""
        self._finished.labels(reason=reason).inc()
        self._last_finished.set_to_current_time()
        self._length.observe(tokens)
        self._span.observe(version_span)

    def scored(self, kind: str, seconds: float) -> None:
        """Count a reward outcome."""
        self._outcomes.labels(kind=kind).inc()
        self._reward_seconds.observe(seconds)
