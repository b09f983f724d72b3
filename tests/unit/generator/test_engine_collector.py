"""Metrics of the generator for an engine that starts, works and fails."""

from __future__ import annotations

from dataclasses import replace

from prometheus_client import CollectorRegistry

from rollmesh.errors import EngineError
from rollmesh.generator.engines.engine_protocol import EngineStatus
from rollmesh.generator.generator_metrics import EngineCollector

WORKING = EngineStatus(
    policy_version=3,
    running_count=5,
    waiting_count=2,
    slot_count=8,
    kv_tokens_used=100,
    kv_token_capacity=1000,
    generated_token_total=790,
    prefill_token_total=60,
    reprefill_token_total=10,
    cached_token_total=40,
    decode_step_total=None,
    busy_seconds_total=2.0,
    running_slot_seconds_total=9.0,
    preemption_total=6,
    held_back_total=7,
    paused=False,
)


class Engine:
    """Answers with a status, or with the error of an engine that has none."""

    def __init__(self) -> None:
        self.now: EngineStatus | None = None

    def status(self) -> EngineStatus:
        if self.now is None:
            raise EngineError("no server")
        return self.now


def test_counters_start_at_zero_and_outlive_the_engine_while_its_load_does_not() -> None:
    engine, registry = Engine(), CollectorRegistry()
    registry.register(EngineCollector(engine.status, lambda: False))

    def scraped(*names: str) -> list[float | None]:
        return [registry.get_sample_value(f"rollmesh_generator_{name}") for name in names]

    counters = ("generated_tokens_total", "preemptions_total", "calls_held_back_total", "cached_token_ratio")
    load = ("running_calls", "waiting_calls", "slots")
    assert scraped(*counters, *load) == [0.0] * 7
    engine.now = WORKING
    assert scraped(*counters, *load) == [790.0, 6.0, 7.0, 0.4, 5.0, 2.0, 8.0]
    engine.now = replace(WORKING, generated_token_total=800)
    scraped("generated_tokens_total")
    engine.now = None
    assert scraped(*counters, *load) == [800.0, 6.0, 7.0, 0.4, 0.0, 0.0, 0.0]
