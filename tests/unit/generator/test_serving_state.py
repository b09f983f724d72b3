"""What a generator says of itself: admission of calls, metrics, and the start of a process that fails."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, EngineError, GenerationRefused
from rollmesh.generator.engines import ENGINES
from rollmesh.generator.engines.engine_protocol import EngineDeclaration, EngineStatus, SpeculationCounters
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.generator.engines.sglang.sglang_options import SglangOptions
from rollmesh.generator.generator_metrics import EngineCollector
from rollmesh.generator.main import serve
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.lifecycle import Shutdown

from ...kit.run_files import made_run


def serving() -> ServingState:
    serving_state = ServingState()
    serving_state.put_in_service()
    return serving_state


def test_nothing_is_let_in_before_a_policy_is_in_the_engine():
    with pytest.raises(GenerationRefused, match="no policy has been loaded"), ServingState().admitted():
        pass


@pytest.mark.parametrize(
    ("close", "message"),
    [
        (ServingState.drain, "draining"),
        (lambda r: r.set_reloading(True), "waiting for running calls"),
        (lambda r: r.take_out_of_service("canary off by 3"), "canary off by 3"),
    ],
)
async def test_a_closed_door_says_why_and_tells_the_registry(close, message):
    serving_state = serving()
    serving_state.changed.clear()
    close(serving_state)
    assert serving_state.changed.is_set()
    with pytest.raises(GenerationRefused, match=message), serving_state.admitted():
        pass
    async with asyncio.timeout(60):
        await serving_state.until_idle()


def test_draining_is_final():
    serving_state = serving()
    serving_state.drain()
    serving_state.put_in_service()
    serving_state.set_reloading(False)
    assert serving_state.reason == "draining"


async def test_idle_means_that_every_admitted_call_has_ended():
    serving_state = serving()
    await serving_state.until_idle()
    with serving_state.admitted():
        waiting = asyncio.create_task(serving_state.until_idle())
        with serving_state.admitted():
            await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
    await waiting


def test_refused_versions_count_once_each_until_one_is_served_and_not_while_they_are_retried():
    serving_state = serving()
    serving_state.refuse(1, "torn", retried=True)
    assert (serving_state.refused_version, serving_state.refused_count) == (1, 0)
    for _ in range(2):
        serving_state.refuse(1, "tampered", retried=False)
    serving_state.refuse(3, "canary", retried=False)
    assert (serving_state.refused_version, serving_state.refused_count) == (3, 2)
    assert serving_state.refused_reason == "canary"
    serving_state.refuse(4, "torn", retried=True)
    assert (serving_state.refused_version, serving_state.refused_count) == (4, 0)
    serving_state.refuse(4, "tampered", retried=False)
    serving_state.accept(2)
    assert serving_state.refused_count == 3
    serving_state.accept(4)
    assert (serving_state.refused_version, serving_state.refused_count) == (None, 0)


WORKING = EngineStatus(
    running_count=5,
    waiting_count=2,
    slot_count=8,
    generated_token_total=790,
    prefill_token_total=60,
    cached_token_total=40,
    preemption_total=6,
    held_back_total=7,
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


def test_drafts_are_counted_by_outcome_and_steps_by_running_calls() -> None:
    engine, registry = Engine(), CollectorRegistry()
    registry.register(EngineCollector(engine.status, lambda: True))

    def scraped(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"rollmesh_generator_{name}", labels)

    assert scraped("draft_tokens_total", outcome="wasted") == scraped("call_steps_total", running="65-more") == 0.0
    counted = SpeculationCounters(draft_bytes=7).with_steps(1, steps=10, drafted=20, accepted=15)
    counted = counted.with_steps(2, 1, 0, 0).with_steps(3, 4, 4, 1).with_steps(4, 4, 4, 1).with_steps(65, 3, 3, 0)
    engine.now = replace(WORKING, speculation=counted)
    assert scraped("draft_tokens_total", outcome="accepted") == 17.0
    assert scraped("draft_tokens_total", outcome="wasted") == 14.0
    assert scraped("draft_bytes") == 7.0
    for running, steps, tokens in (("1", 10, 25), ("2", 1, 1), ("3-4", 8, 10), ("5-8", 0, 0), ("65-more", 3, 3)):
        assert scraped("call_steps_total", running=running) == steps
        assert scraped("step_tokens_total", running=running) == tokens
    assert counted.by_name() == {"drafted": 31, "accepted": 17} | {
        "steps 1": 10,
        "tokens 1": 25,
        "steps 2": 1,
        "tokens 2": 1,
        "steps 3-4": 8,
        "tokens 3-4": 10,
        "steps 65-more": 3,
        "tokens 65-more": 3,
    }


class WatchedEngine(SglangEngine):
    """The real engine; it notes that it was closed."""

    closed = False

    async def aclose(self) -> None:
        await super().aclose()
        self.closed = True


async def test_a_start_that_fails_after_the_engine_was_built_closes_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[WatchedEngine] = []

    def build(config: RunConfig, index: int) -> WatchedEngine:
        built.append(WatchedEngine(SglangOptions.from_config(config, index)))
        return built[0]

    monkeypatch.setitem(ENGINES, "sglang", EngineDeclaration(build=build))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        generator = {"engine": "sglang", "sglang": {"url": "http://127.0.0.1:1"}}
        config = made_run(tmp_path, generator=generator, network={"admin_port": port})
        with pytest.raises(ConfigError, match=f"{port}"):
            await serve(config, 0, Shutdown())
    assert [engine.closed for engine in built] == [True]
