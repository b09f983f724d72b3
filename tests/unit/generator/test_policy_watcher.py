"""The order of a load: what a caller that hangs up, or a canary that cannot be scored, leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError, ConfigError, EngineError, RollmeshError, UnsupportedModel
from rollmesh.generator.canary import Canary
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.policy_watcher import PolicyWatcher
from rollmesh.generator.reload_turn import ReloadTurns
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.store.policy_registry import PolicyOutlook
from rollmesh.types import PolicyRecord


@dataclass
class Engine:
    """Writes down what it is told; scores 0 for every token."""

    told: list[str] = field(default_factory=list)
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    start_error: RollmeshError | None = None
    score_error: EngineError | None = None
    paused: bool = False

    async def start(self, folder: Path, version: int) -> None:
        assert not self.told, "started twice"
        if self.start_error is not None:
            raise self.start_error
        self.told.append(f"start {version}")

    async def stage(self, folder: Path) -> None:
        pass

    async def pause(self) -> None:
        self.paused = True

    async def resume(self) -> None:
        self.paused = False
        self.told.append("resume")

    async def load(self, folder: Path, version: int, mode: OnNewVersion) -> float:
        await self.may_load.wait()
        self.told.append(f"load {version}")
        return 0.0

    async def score(self, sequences: list[Any]) -> list[Any]:
        if self.score_error is not None:
            raise self.score_error
        return [np.zeros(len(ids) - 1, np.float32) for ids in sequences]

    def status(self) -> Any:
        return SimpleNamespace(paused=self.paused)


@dataclass
class Registry:
    """Has announced every version up to the newest, and pins none."""

    newest: int = 0
    required: int = 0
    looks: int = 0
    """Times that a watcher waited, with nothing to load."""

    async def outlook(self, instance_id: str) -> PolicyOutlook:
        return PolicyOutlook(newest=await self.get(self.newest), pinned=None, required_version=self.required)

    async def wait(self, after: int, timeout: float) -> None:
        self.looks += 1
        await asyncio.sleep(0.001)

    async def get(self, version: int) -> PolicyRecord:
        return PolicyRecord(policy_version=version, train_step=version, path=str(version), manifest_digest="")


class Checkpoints:
    """Every policy is whole, and its trainer found 0 for every token."""

    def open(self, record: PolicyRecord, like: Any = None) -> Any:
        canary = [SimpleNamespace(token_ids=[1, 2, 3], logprobs=[0.0, 0.0])]
        manifest = SimpleNamespace(policy_version=record.policy_version, canary=canary, files=[])
        return SimpleNamespace(folder=Path(record.path), manifest=manifest)

    def fetch(self, record: PolicyRecord, like: Any = None) -> Any:
        return self.open(record, like)

    def verify(self, policy: Any) -> Any:
        return policy


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def serving_state() -> ServingState:
    return ServingState()


@pytest.fixture
def registry() -> Registry:
    return Registry()


@pytest.fixture
def rules() -> ReloadRules:
    return ReloadRules()


@pytest.fixture
def watcher(engine: Engine, serving_state: ServingState, registry: Registry, rules: ReloadRules) -> PolicyWatcher:
    metrics = GeneratorMetrics(Metrics("generator"))
    parts: tuple[Any, ...] = (engine, registry, Checkpoints(), serving_state, metrics)
    limits: dict[str, Any] = {"canary": Canary(threshold=0.1, min_change=1e-6), "max_context_tokens": 64}
    turns = ReloadTurns(None, "g", metrics, at_once=None, ttl=30.0)  # type: ignore[arg-type]
    return PolicyWatcher(*parts, Health(), mode=OnNewVersion.INTERRUPT, rules=rules, turns=turns, **limits)


async def test_a_caller_that_hangs_up_does_not_stop_the_load_that_it_asked_for(watcher, engine, serving_state):
    await watcher.load_version(0)
    asked = asyncio.create_task(watcher.load_version(1))
    async with asyncio.timeout(60):
        while not engine.paused:
            await asyncio.sleep(0.001)
    asked.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await asked
    assert engine.paused and engine.told == ["start 0"]
    engine.may_load.set()
    await watcher.load_version(1)  # waits for the one under way, and finds nothing left to do
    assert engine.told == ["start 0", "load 1", "resume"]
    assert not serving_state.reason


async def test_a_version_is_known_to_be_in_use_from_before_it_is_read_until_it_serves_or_is_refused(
    watcher, engine, serving_state, monkeypatch
):
    in_use: list[int | None] = []
    whole = Checkpoints.open

    def open_policy(checkpoints: Checkpoints, record: PolicyRecord, like: Any = None) -> Any:
        in_use.append(serving_state.loading_version if serving_state.changed.is_set() else None)
        if record.policy_version == 2:
            raise CheckpointError("torn", reason=Reason.TORN)
        return whole(checkpoints, record, like)

    monkeypatch.setattr(Checkpoints, "open", open_policy)
    await watcher.load_version(0)
    serving_state.changed.clear()
    slow = asyncio.create_task(watcher.load_version(1))
    async with asyncio.timeout(60):
        while not engine.paused:
            await asyncio.sleep(0.001)
    assert serving_state.loading_version == 1
    engine.may_load.set()
    await slow
    assert serving_state.loading_version is None and serving_state.changed.is_set()
    with pytest.raises(CheckpointError):
        await watcher.load_version(2)
    assert serving_state.loading_version is None
    assert in_use == [0, 1, 2]


async def test_a_first_canary_that_cannot_be_scored_leaves_an_engine_that_the_next_version_can_use(
    watcher, engine, serving_state
):
    engine.score_error = EngineError("out of memory")
    with pytest.raises(EngineError, match="out of memory"):
        await watcher.load_version(0)
    assert "out of memory" in serving_state.reason
    engine.score_error = None
    engine.may_load.set()
    await watcher.load_version(1)
    assert engine.told == ["start 0", "load 1", "resume"]
    assert not serving_state.reason


@pytest.mark.parametrize(
    ("error", "final"),
    [
        (UnsupportedModel("config.model_type='gpt2': the torch engine serves qwen2, qwen3, llama"), True),
        (ConfigError("generator.max_context_tokens=640 is more than the model's max_position_embeddings=512"), True),
        (EngineError("model.safetensors: cannot be read"), False),
    ],
)
async def test_a_first_policy_that_the_engine_cannot_load_ends_the_process_and_says_whether_a_restart_helps(
    watcher, engine, error, final
):
    engine.start_error = error
    async with asyncio.timeout(60):
        with pytest.raises(type(error)) as ended:
            await watcher.run()
    assert ended.value is error and error.final is final


@pytest.mark.parametrize("rules", [ReloadRules(every_versions=3, last_train_step=5)])
async def test_the_watcher_passes_over_versions_between_two_multiples_of_k(watcher, engine, registry):
    engine.may_load.set()
    running = asyncio.create_task(watcher.run())

    async def looked_twice() -> list[str]:
        before = registry.looks
        async with asyncio.timeout(60):
            while registry.looks < before + 2:
                assert not running.done()
                await asyncio.sleep(0.001)
        return [what for what in engine.told if what != "resume"]

    try:
        assert await looked_twice() == ["start 0"]
        registry.newest = 2
        assert await looked_twice() == ["start 0"]
        registry.newest = 3
        assert await looked_twice() == ["start 0", "load 3"]
        registry.newest = 4
        assert await looked_twice() == ["start 0", "load 3"]
        registry.required = 4
        assert await looked_twice() == ["start 0", "load 3", "load 4"]
        registry.newest = 5
        assert await looked_twice() == ["start 0", "load 3", "load 4", "load 5"], "the last one"
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
