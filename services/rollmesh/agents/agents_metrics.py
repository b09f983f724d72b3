"""Metrics of the OpenAI-compatible API."""

from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics
from rollmesh.worker.worker_metrics import CALL_ENDS

ENDPOINTS = ("chat", "completions", "generate", "responses")
OUTCOMES = ("answered", "refused", "failed", "cancelled")
SESSION_ENDS = ("rewarded", "given_up", "idle", "lost")
SESSION_STATES = ("active", "parked", "waiting")
DRIFTS = ("forked", "restarted")
_RECORDED = ("yes", "no")


class OpenAiMetrics:
    """Metrics of calls, tokens, sessions and drift; implements ``TrajectoryMetrics`` for unrecorded calls."""

    def __init__(self, metrics: Metrics) -> None:
        self._count_calls(metrics)
        self._count_sessions(metrics)

    def _count_calls(self, metrics: Metrics) -> None:
        self.calls = metrics.counter(
            "rollmesh_agents_calls_total",
            "Calls of the OpenAI-compatible API: answered, refused (the request is invalid or cannot be served), "
            "failed, or cancelled by the client.",
            {"endpoint": ENDPOINTS, "recorded": _RECORDED, "outcome": OUTCOMES},
        )
        self.running = metrics.gauge("rollmesh_agents_running_calls", "Calls of the API in progress.")
        self.call_seconds = metrics.histogram(
            "rollmesh_agents_call_seconds", "Time from a call to the end of its answer.", LATENCY_BUCKETS
        )
        self.first_text_seconds = metrics.histogram(
            "rollmesh_agents_first_text_seconds", "Time from a call to the first text of its answer.", LATENCY_BUCKETS
        )
        self.last_answer = metrics.gauge(
            "rollmesh_agents_last_answer_timestamp_seconds", "Unix time of the last answered call."
        )
        self.context_tokens = metrics.counter(
            "rollmesh_agents_context_tokens_total", "Context tokens of the calls.", {"recorded": _RECORDED}
        )
        self.cached_tokens = metrics.counter(
            "rollmesh_agents_cached_tokens_total",
            "Context tokens of the calls that their generators found in a prefix cache.",
            {"recorded": _RECORDED},
        )
        self.answer_tokens = metrics.counter(
            "rollmesh_agents_answer_tokens_total", "Answer tokens of the calls.", {"recorded": _RECORDED}
        )
        self.calls_ended = metrics.counter(
            "rollmesh_agents_generation_calls_ended_total",
            "Generation calls behind unrecorded calls, by the reason for their end.",
            {"reason": CALL_ENDS},
        )
        self.fruitless_calls = metrics.counter(
            "rollmesh_agents_generation_calls_fruitless_total",
            "Generation calls behind unrecorded calls that ended without a token.",
        )
        self.evaluation_tokens = metrics.counter(
            "rollmesh_agents_pinned_tokens_total", "Answer tokens of calls pinned to one policy version."
        )

    def _count_sessions(self, metrics: Metrics) -> None:
        self.sessions = metrics.gauge(
            "rollmesh_agents_sessions",
            "Sessions of outside agents: active, parked (a trajectory waits for its next lease), waiting for a prompt.",
            {"state": SESSION_STATES},
        )
        self.sessions_opened = metrics.counter(
            "rollmesh_agents_sessions_opened_total",
            "Sessions opened, including those taken over from a crashed process.",
        )
        self.sessions_ended = metrics.counter(
            "rollmesh_agents_sessions_ended_total", "Sessions ended, by outcome.", {"how": SESSION_ENDS}
        )
        self.drift = metrics.counter(
            "rollmesh_agents_drift_total",
            "Contexts that differ from the recorded trajectory: another trajectory was opened (forked), or the same "
            "one was restarted because there was no room for another (restarted).",
            {"outcome": DRIFTS},
        )
        self.sessions_lost = metrics.counter(
            "rollmesh_agents_worker_sessions_lost_total", "Worker sessions of this service that expired."
        )

    def sampled(self, count: int, age: int) -> None:
        """Ignore tokens of an unrecorded call; they are counted once the answer ends."""
