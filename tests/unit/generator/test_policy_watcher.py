"""The order of a load: what a caller that hangs up, or a canary that cannot be scored, leaves behind."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import CheckpointError, ConfigError, EngineError, Reason, RollmeshError, UnsupportedModel
from rollmesh.generator import policy_watcher
from rollmesh.generator.canary import Canary
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.policy_loader import PolicyLoader
from rollmesh.generator.policy_watcher import PolicyWatcher, ReloadTurns
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.tasks import Backoff, cancel_and_wait
from rollmesh.scheduling.next_policy import ReloadRules
from rollmesh.store.policy_registry import PolicyOutlook
from rollmesh.types import PolicyRecord

from ...kit.waiting import reached


@dataclass
class Engine:
    """Writes down what it is told; scores 0 for every token."""

    told: list[str] = field(default_factory=list)
    may_load: asyncio.Event = field(default_factory=asyncio.Event)
    """Set unless a test clears it: a load waits for it."""
    start_error: RollmeshError | None = None
    score_error: EngineError | None = None
    paused: bool = False
    staged: int | None = None
    scores_staged: bool = False
    held_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.may_load.set()

    async def start(self, folder: Path, version: int) -> None:
        assert not self.told, "started twice"
        if self.start_error is not None:
            raise self.start_error
        self.told.append(f"start {version}")

    async def stage(self, folder: Path, version: int) -> bool:
        self.staged = version
        return self.scores_staged

    async def pause(self) -> None:
        self.paused = True
        if self.scores_staged:
            self.told.append("pause")

    async def resume(self) -> None:
        self.paused = False
        self.told.append("resume")

    async def load(self, folder: Path, version: int, mode: OnNewVersion) -> float:
        await self.may_load.wait()
        self.told.append(f"load {version}")
        return self.held_seconds

    async def score(self, sequences: list[Any], version: int | None = None) -> list[Any]:
        if self.score_error is not None:
            raise self.score_error
        if version is not None:
            self.told.append(f"score {version}")
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
    """Every policy is whole, unless an error is to be raised first, and its trainer found 0 for every token."""

    def __init__(self) -> None:
        self.errors: dict[int, list[CheckpointError]] = {}
        """By version; each is raised once."""
        self.opened: Callable[[int], None] = lambda version: None

    def open(self, record: PolicyRecord, like: Any = None) -> Any:
        self.opened(record.policy_version)
        if errors := self.errors.get(record.policy_version):
            raise errors.pop()
        canary = [SimpleNamespace(token_ids=[1, 2, 3], logprobs=[0.0, 0.0])]
        manifest = SimpleNamespace(policy_version=record.policy_version, canary=canary, files=[], base=None)
        return SimpleNamespace(folder=Path(record.path), manifest=manifest, base=None)

    def fetch(self, record: PolicyRecord, like: Any = None) -> Any:
        return self.open(record, like)

    def verify(self, policy: Any) -> Any:
        return policy


class Adapters(Checkpoints):
    """Version 0 is the base of every other version; version 9 has another one."""

    def open(self, record: PolicyRecord, like: Any = None) -> Any:
        policy = super().open(record)
        if record.policy_version > 0:
            policy.base = super().open(PolicyRecord(policy_version=0, train_step=0, path="0", manifest_digest=""))
            policy.manifest.base = "policy version 0"
            policy.base.manifest.files = ["other"] if record.policy_version == 9 else []
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
def mode() -> OnNewVersion:
    return OnNewVersion.INTERRUPT


@pytest.fixture
def checkpoints(mode: OnNewVersion) -> Checkpoints:
    return Adapters() if mode is OnNewVersion.NEXT_SLICE else Checkpoints()


@pytest.fixture
def watcher(
    engine: Engine,
    serving_state: ServingState,
    registry: Registry,
    rules: ReloadRules,
    mode: OnNewVersion,
    checkpoints: Checkpoints,
) -> PolicyWatcher:
    metrics = GeneratorMetrics(Metrics("generator"))
    parts: tuple[Any, ...] = (engine, checkpoints, serving_state, metrics)
    loader = PolicyLoader(*parts, mode=mode, canary=Canary(threshold=0.1, min_change=1e-6), max_context_tokens=64)
    turns = ReloadTurns(None, "g", metrics, at_once=None, ttl=30.0)  # type: ignore[arg-type]
    others: tuple[Any, ...] = (loader, registry, serving_state, metrics, Health())
    return PolicyWatcher(*others, rules=rules, turns=turns)


async def test_a_caller_that_hangs_up_does_not_stop_the_load_that_it_asked_for(watcher, engine, serving_state):
    await watcher.load_version(0)
    engine.may_load.clear()
    asked = asyncio.create_task(watcher.load_version(1))
    await reached(lambda: engine.paused)
    await cancel_and_wait(asked)
    assert engine.paused and engine.told == ["start 0"]
    engine.may_load.set()
    await watcher.load_version(1)  # waits for the one under way, and finds nothing left to do
    assert engine.told == ["start 0", "load 1", "resume"]
    assert not serving_state.reason


async def test_a_version_is_known_to_be_in_use_from_before_it_is_read_until_it_serves_or_is_refused(
    watcher, engine, serving_state, checkpoints
):
    in_use: list[int | None] = []
    checkpoints.errors[2] = [CheckpointError("torn", reason=Reason.TORN)]
    checkpoints.opened = lambda version: in_use.append(
        serving_state.loading_version if serving_state.changed.is_set() else None
    )
    await watcher.load_version(0)
    serving_state.changed.clear()
    engine.may_load.clear()
    slow = asyncio.create_task(watcher.load_version(1))
    await reached(lambda: engine.paused)
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


async def test_staged_weights_are_scored_before_their_swap_which_is_the_whole_pause(watcher, engine, serving_state):
    engine.scores_staged = True
    engine.held_seconds = 0.25
    await watcher.load_version(0)
    await watcher.load_version(1)
    assert engine.told == ["start 0", "score 1", "load 1"]
    assert not serving_state.reason
    (samples,) = [metric.samples for metric in watcher._metrics.pause_seconds.collect()]
    assert {s.value for s in samples if s.name.endswith("_sum")} == {0.25}


@pytest.mark.parametrize("scores_staged", [True, False])
async def test_an_engine_that_an_operator_paused_stays_paused_under_new_weights(watcher, engine, scores_staged):
    engine.scores_staged = scores_staged
    await watcher.load_version(0)
    await engine.pause()
    await watcher.load_version(1)
    assert "load 1" in engine.told and engine.paused


@contextlib.asynccontextmanager
async def running(
    watcher: PolicyWatcher, registry: Registry, engine: Engine
) -> AsyncIterator[Callable[[], Awaitable[list[str]]]]:
    """Run the watcher in the block.

    Yields a function that waits until it has found nothing to load twice; what it told the engine, but for what
    resumes it.
    """
    task = asyncio.create_task(watcher.run())

    async def told() -> list[str]:
        before = registry.looks
        await reached(lambda: task.done() or registry.looks >= before + 2)
        assert not task.done()
        return [what for what in engine.told if what != "resume"]

    try:
        yield told
    finally:
        await cancel_and_wait(task)


async def test_a_policy_that_could_not_be_fetched_during_an_outage_of_the_object_store_is_tried_again(
    watcher, engine, registry, serving_state, checkpoints, monkeypatch
):
    monkeypatch.setattr(policy_watcher, "_BACKOFF", Backoff(first_seconds=0.0))
    for version in (0, 1):
        checkpoints.errors[version] = [CheckpointError("connection refused", reason=Reason.UNREACHABLE)]
    async with running(watcher, registry, engine) as told:
        assert await told() == ["start 0"]
        registry.newest = 1
        assert await told() == ["start 0", "load 1"]
    assert checkpoints.errors == {0: [], 1: []}
    assert not serving_state.reason and serving_state.refused_version is None


async def test_a_generator_whose_object_store_refuses_it_ends_before_its_first_policy_and_keeps_serving_after_it(
    watcher, engine, registry, serving_state, checkpoints, monkeypatch
):
    monkeypatch.setattr(policy_watcher, "_BACKOFF", Backoff(first_seconds=0.01))
    refusals = [CheckpointError("AccessDenied; allow it to read", reason=Reason.REFUSED)] * 10_000
    checkpoints.errors = {0: refusals[:1], 1: refusals}
    with pytest.raises(CheckpointError, match="AccessDenied; allow it to read") as ended:
        await watcher.run()
    assert ended.value.final
    async with running(watcher, registry, engine) as told:
        assert await told() == ["start 0"]
        assert watcher._health.waits.text() == ""
        registry.newest = 1
        await reached(lambda: bool(watcher._health.waits.text()))
        assert watcher._health.waits.text() == "policy version 1: AccessDenied; allow it to read"
        assert not serving_state.reason and serving_state.refused_version is None


_ADAPTERS = pytest.mark.parametrize("mode", [OnNewVersion.NEXT_SLICE])


@_ADAPTERS
async def test_an_adapter_above_another_base_is_refused_and_the_old_one_serves_on(watcher, engine, serving_state):
    await watcher.load_version(1)
    with pytest.raises(CheckpointError, match="policy_version 9: its base is policy version 0, but .* of other files"):
        await watcher.load_version(9)
    assert engine.staged == 1 and not serving_state.reason


async def test_an_adapter_in_a_run_of_full_weights_is_refused(watcher, engine, monkeypatch):
    monkeypatch.setattr(watcher._loader, "_checkpoints", Adapters())
    with pytest.raises(CheckpointError, match="is an adapter, but the run file has no model.adapter"):
        await watcher.load_version(1)
    assert engine.told == []
