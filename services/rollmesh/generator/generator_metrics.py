"""Prometheus metrics of the generator: the engine's counters, and the results of calls and reloads."""

from collections.abc import Callable, Iterator

from prometheus_client import Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from rollmesh.errors import EngineError, Reason
from rollmesh.generator.engines.engine_protocol import RUNNING_CLASSES, EngineStatus, SpeculationCounters
from rollmesh.runtime.metrics import Metrics
from rollmesh.types import FinishReason

CALL_ENDS = (
    *(r.value for r in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.INTERRUPTED)),
    "cancelled",
    "refused",
    "invalid",
    "failed",
)
RELOAD_PHASES = ("fetch", "verify", "stage", "swap", "canary")
RELOAD_FAILURES = (*(r.value for r in Reason), "engine", "canary", "store")

_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("generated_tokens", "Tokens sampled.", "generated_token_total"),
    ("prefill_tokens", "Context tokens computed.", "prefill_token_total"),
    ("reprefill_tokens", "Context tokens computed again after a generator sampled them.", "reprefill_token_total"),
    ("cached_tokens", "Context tokens copied from a prefix cache.", "cached_token_total"),
    ("preemptions", "Calls that lost their cache because it was full.", "preemption_total"),
    ("decode_steps", "Decode steps; absent for an engine that does not count them.", "decode_step_total"),
    ("calls_held_back", "Times a call was held because its caller was late to save the tokens.", "held_back_total"),
    ("busy_seconds", "Time in prefill and decode.", "busy_seconds_total"),
    (
        "running_slot_seconds",
        "Integral of running calls over the time in prefill and decode: the bubble ratio's numerator.",
        "running_slot_seconds_total",
    ),
)
_GAUGES: tuple[tuple[str, str, str], ...] = (
    ("running_calls", "Calls in slots.", "running_count"),
    ("waiting_calls", "Calls waiting for a slot.", "waiting_count"),
    ("slots", "Maximum number of calls decoded at once.", "slot_count"),
    ("kv_tokens", "Tokens in the key-value cache.", "kv_tokens_used"),
    ("kv_capacity_tokens", "Capacity of the key-value cache in tokens.", "kv_token_capacity"),
    ("policy_version", "Policy version in the engine.", "policy_version"),
    ("paused", "1 while decoding is paused.", "paused"),
)


class GeneratorMetrics:
    """Counters of the service and the policy watcher."""

    def __init__(self, metrics: Metrics) -> None:
        self._ended = metrics.counter(
            "rollmesh_generator_calls_ended_total", "Generation calls ended, by reason.", {"reason": CALL_ENDS}
        )
        self.calls = metrics.counter("rollmesh_generator_calls_total", "Generation calls received.")
        self._last_call = metrics.gauge(
            "rollmesh_generator_last_call_timestamp_seconds", "Time at which a generation call last ended."
        )
        self.reloads = metrics.counter("rollmesh_generator_reloads_total", "Attempts to load a policy version.")
        self.reload_failures = metrics.counter(
            "rollmesh_generator_reload_failures_total",
            "Loads that failed; the old policy stays.",
            {"reason": RELOAD_FAILURES},
        )
        self.reload_bytes = metrics.counter("rollmesh_generator_reload_bytes_total", "Bytes of policies loaded.")
        self.reload_seconds = metrics.histogram(
            "rollmesh_generator_reload_seconds", "Time to load and serve a new version, verification included."
        )
        self.phase_seconds = metrics.histogram(
            "rollmesh_generator_reload_phase_seconds",
            "Wall time of a load's phases; verify and stage run at the same time while the old version serves.",
            labels={"phase": RELOAD_PHASES},
        )
        self.pause_seconds = metrics.histogram(
            "rollmesh_generator_reload_pause_seconds",
            "Time during which a reload held decoding: the swap, and the canary if it is scored after the swap.",
        )
        self.reload_wait_seconds = metrics.histogram(
            "rollmesh_generator_reload_wait_seconds",
            "Time for which a new version waited for its turn; only with generator.reload_at_once.",
        )
        self.reload_waiting = metrics.gauge(
            "rollmesh_generator_reload_waiting", "1 while a new version waits because other generators load."
        )
        self.last_reload = metrics.gauge(
            "rollmesh_generator_last_reload_timestamp_seconds", "Time at which the policy in the engine was loaded."
        )
        self.canary_gap = metrics.gauge(
            "rollmesh_generator_canary_logprob_gap", "Largest logprob difference from the trainer on the canary."
        )
        self.heartbeats = metrics.counter("rollmesh_generator_heartbeats_total", "Attempts to renew the registration.")
        self.heartbeat_failures = metrics.counter(
            "rollmesh_generator_heartbeat_failures_total", "Renewals that failed because the store was unreachable."
        )

    def call_ended(self, reason: str) -> None:
        """Count the end of a call; ``reason`` is one of CALL_ENDS."""
        self._ended.labels(reason=reason).inc()
        self._last_call.set_to_current_time()


class EngineCollector(Collector):
    """Collector that reads the engine's status at every scrape.

    All values are zero until the engine has started. After the engine has failed, gauges are zero and counters keep
    their last value: Prometheus takes a falling counter for a new process.
    """

    def __init__(self, status: Callable[[], EngineStatus], serves: Callable[[], bool]) -> None:
        self._status = status
        self._serves = serves
        self._counted = EngineStatus()

    def collect(self) -> Iterator[Metric]:
        try:
            status = self._counted = self._status()
        except EngineError:
            status = EngineStatus(policy_version=0)
        counted = self._counted
        for name, text, field in _COUNTERS:
            value = getattr(counted, field)
            if value is not None:
                yield CounterMetricFamily(f"rollmesh_generator_{name}", text, value=value)
        for name, text, field in _GAUGES:
            yield GaugeMetricFamily(f"rollmesh_generator_{name}", text, value=float(getattr(status, field)))
        context_tokens = counted.cached_token_total + counted.prefill_token_total
        yield GaugeMetricFamily(
            "rollmesh_generator_cached_token_ratio",
            "Share of context tokens copied from a prefix cache, since the engine started.",
            value=counted.cached_token_total / max(1, context_tokens),
        )
        yield from _speculation(counted.speculation or SpeculationCounters())
        serving = float(self._serves())
        yield GaugeMetricFamily("rollmesh_generator_serving", "1 while the generator accepts calls.", value=serving)


def _speculation(counted: SpeculationCounters) -> Iterator[Metric]:
    """Yield the metrics of speculative decoding; all zero while it is off."""
    drafts = CounterMetricFamily(
        "rollmesh_generator_draft_tokens",
        "Draft tokens verified, by outcome; an accepted one saves its call a decode step.",
        labels=["outcome"],
    )
    drafts.add_metric(["accepted"], counted.accepted_token_total)
    drafts.add_metric(["wasted"], counted.wasted_token_total)
    yield drafts
    yield GaugeMetricFamily("rollmesh_generator_draft_bytes", "Memory of the drafts.", value=counted.draft_bytes)
    for name, text, values in (
        ("call_steps", "Running calls, summed over the decode steps that count drafts.", counted.row_steps),
        (
            "step_tokens",
            "Tokens sampled in these steps; over the calls, the tokens of a call a step.",
            counted.row_tokens,
        ),
    ):
        family = CounterMetricFamily(f"rollmesh_generator_{name}", f"{text} By running calls.", labels=["running"])
        for running, value in zip(RUNNING_CLASSES, values, strict=True):
            family.add_metric([running], value)
        yield family
