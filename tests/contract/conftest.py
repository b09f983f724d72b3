"""The engines under contract: embedded torch, SGLang's adapter before a stand-in, and before the real server."""

import functools
import importlib.util
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.config.generator import GeneratorConfig
from rollmesh.config.model import AdapterConfig
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.engines.policy_folders import AdapterSettings
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import Int32Array

from ..kit.adapters import ALL_LINEAR, ALPHA, RANK, merge, write_adapter
from ..kit.environments import python_of
from ..kit.generation import VOCAB, prompt_ids
from ..sglang_cpu.options import sglang_options
from ..sglang_cpu.server import UNPINNED, running_server
from .contract_kit import KEY, LONGEST, StandIn, hf_greedy, write_draft, write_model
from .served import Policies, Served

_SERVER_ARGUMENTS = (
    "--skip-tokenizer-init",
    *("--weight-version", "0"),
    *("--max-total-tokens", "16384", "--max-running-requests", "32"),
    *("--admin-api-key", KEY, "--api-key", KEY),
)
KINDS = ("sglang-overlap", "sglang-serial", "torch-drafts", "torch", "stand-in")
"""The real server twice: with the overlapping schedule that it has by default, and without, as keep_kv needs it; the
embedded engine without and with speculation."""
ADAPTER_KINDS = ("adapters-sglang", "adapters-torch", "adapters-stand-in")
"""Engines that serve adapters above one base; those of ``KINDS`` serve full weights."""
_TORCH_PACE = ((1, 0.005),)
"""Seconds of a decode step. At its own pace the embedded engine is through with a long call in 30 ms, and a test that
means to meet a running call may be held up for longer. The other engines wait for this process after every slice."""
_PASSED: Counter[str] = Counter()
_TEST_SECONDS = 1500
"""The first case of a kind waits for the start of its server, which takes minutes on busy cores."""
_SMOKE_TEST = "test_server_facts.py"
_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every deadline inside of a test passes first and says what it waited for; a process has all cases of a kind.

    The kinds with a real server come first: they take longest. `make test` asks one real server for the facts that the
    engine relies on, the smoke test of all others.
    """
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))
            if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
                group = _group(item.callspec.params)
                item.add_marker(pytest.mark.xdist_group(group))
                if "sglang" in group and item.path.name != _SMOKE_TEST:
                    item.add_marker(pytest.mark.long)
    items.sort(key=lambda item: "sglang" not in _group(getattr(getattr(item, "callspec", None), "params", {})))


def _group(params: dict[str, Any]) -> str:
    """Cases of one kind run in one process, which starts its server once."""
    return str(params.get("endpoint") or params.get("adapter_endpoint") or "no server")


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    disable_progress_bar()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of policy versions 0 to 3."""
    root = tmp_path_factory.mktemp("models")
    return [write_model(root / f"policy-{seed}", seed) for seed in range(4)]


@pytest.fixture(scope="session")
def sglang_python() -> Path:
    """Python of an environment with the real server; skips where it is not installed."""
    return python_of("sglang-cpu")


@pytest.fixture(scope="session", params=KINDS)
def endpoint(
    request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str | None]]:
    """An engine's kind and the server behind it; pytest runs all cases of one kind before it starts the next."""
    kind = str(request.param)
    log = tmp_path_factory.mktemp("server") / "server.log"
    if kind.startswith("torch"):
        yield kind, None
    elif kind == "stand-in":
        server = StandIn(models[0], log)
        yield kind, server.url
        server.stop()
    elif kind == "sglang-drafts":
        draft = ("--speculative-draft-model-path", str(write_draft(log.parent / "draft", seed=4)))
        with running_server(_drafting_python(), models[0], log, (*_DRAFT_ARGUMENTS, *draft), _ON_CUDA) as real:
            yield kind, real.url
    else:
        python = request.getfixturevalue("sglang_python")
        serial = ("--disable-overlap-schedule",) if kind == "sglang-serial" else ()
        with running_server(python, models[0], log, _SERVER_ARGUMENTS + serial) as real:
            yield kind, real.url


_DRAFT_ARGUMENTS = (
    *_SERVER_ARGUMENTS,
    *("--device", "cuda", "--attention-backend", "triton"),
    *("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "3", "--speculative-eagle-topk", "4"),
    *("--speculative-num-draft-tokens", "8"),
)
_ON_CUDA = {"SGLANG_USE_CPU_ENGINE": "0"}


def _drafting_python() -> Path:
    """The Python of a server with drafts; skips where none can verify them by sampling."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device: elsewhere an SGLang server verifies drafts by argmax")
    if importlib.util.find_spec("sglang") is None:
        pytest.skip("SGLang for CUDA is not installed: pip install -e '.[sglang]'")
    return Path(sys.executable)


@pytest.fixture(scope="session")
def policies(models: list[Path]) -> Policies:
    return Policies(models)


@pytest.fixture
def served(endpoint: tuple[str, str | None], policies: Policies) -> Iterator[Served]:
    """The server itself on policy version 0, running, with an empty cache."""
    _, url = endpoint
    assert url is not None
    with Served(url, policies) as served:
        served.reset()
        yield served


@functools.lru_cache
def partly_right(model: Path) -> list[tuple[Int32Array, Int32Array]]:
    """Prompts of the cases, and the greedy answers to them with every twentieth token wrong."""
    prompts = [prompt_ids(seed, count) for seed in range(4) for count in (8, 12)]
    answers = [hf_greedy(model, ids, 60) for ids in prompts]
    for answer in answers:
        answer[19::20] = (answer[19::20] + 1) % VOCAB
    return list(zip(prompts, answers, strict=True))


def slow_down_and_draft(engine: TorchEngine, model: Path) -> None:
    """Give an engine with speculation a history, and the pace of ``_TORCH_PACE``, which its settings refuse."""
    thread = engine._thread
    assert thread is not None and thread.batch.speculation is not None
    for ids, answer in partly_right(model):
        thread.batch.speculation.remember(ids, answer)
    step, pace = thread.batch.step, dict(_TORCH_PACE)

    def slow_step() -> None:
        step()
        time.sleep(pace[1])

    thread.batch.step = slow_step  # type: ignore[method-assign]


class EngineMaker:
    """``await make(slots=4)``: an engine of this kind on policy version 0, closed at the end of the test."""

    def __init__(self, kind: str, url: str | None, models: list[Path], adapter: AdapterSettings | None = None) -> None:
        self.kind = kind
        self.retracts = not kind.startswith("torch")
        """An interrupting load prefills running calls again instead of ending them."""
        self.overlaps = kind == "sglang-overlap"
        """A step is under way while the one before it is accounted for."""
        self._url = url
        self._models = models
        self._adapter = adapter
        self._engines: list[Engine] = []

    async def __call__(self, *, slots: int = 8, version: int = 0, **sglang: Any) -> Engine:
        engine: Engine
        if self.kind == "torch-drafts":
            engine = TorchEngine(
                GeneratorConfig(slots=slots, max_context_tokens=LONGEST, device="cpu", speculation="history")
            )
        elif self.kind == "torch":
            engine = TorchEngine(
                GeneratorConfig(slots=slots, max_context_tokens=LONGEST, device="cpu", pace=list(_TORCH_PACE)),
                adapter=self._adapter,
            )
        else:
            server: dict[str, Any] = {"url": self._url, "admin_key": KEY, "adapter": self._adapter, **sglang}
            options = sglang_options(slots=slots, max_context_tokens=LONGEST, **server)
            engine = SglangEngine(options)
        self._engines.append(engine)
        await engine.start(self._models[version], version)
        if self.kind == "torch-drafts":
            slow_down_and_draft(engine, self._models[version])
        return engine

    async def aclose(self) -> None:
        for engine in self._engines:
            await engine.aclose()


@pytest.fixture(scope="session")
def adapters(models: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Folders of policy versions 0 to 5: the base, and adapters above it."""
    root = tmp_path_factory.mktemp("adapters")
    return [models[0], *(write_adapter(root / f"adapter-{seed}", models[0], seed) for seed in range(1, 6))]


@pytest.fixture(scope="session")
def merged(adapters: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Full folders that compute the same as ``adapters``."""
    root, base = tmp_path_factory.mktemp("merged"), adapters[0]
    return [base, *(merge(root / adapter.name, base, adapter) for adapter in adapters[1:])]


_LORA_ARGUMENTS = (
    *("--enable-lora", "--lora-strict-loading", "--max-lora-rank", str(RANK), "--max-loras-per-batch", "6"),
    *("--max-loaded-loras", "16", "--lora-target-modules", *ALL_LINEAR),
)


@pytest.fixture(scope="session", params=ADAPTER_KINDS)
def adapter_endpoint(
    request: pytest.FixtureRequest, models: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, str | None]]:
    """An engine's kind and the server behind it, which was started for adapters."""
    kind = str(request.param).removeprefix("adapters-")
    log = tmp_path_factory.mktemp("server") / "server.log"
    if kind == "torch":
        yield kind, None
    elif kind == "stand-in":
        server = StandIn(models[0], log, _LORA_ARGUMENTS)
        yield kind, server.url
        server.stop()
    else:
        python = request.getfixturevalue("sglang_python")
        arguments = (*_SERVER_ARGUMENTS, "--lora-backend", "torch_native", *_LORA_ARGUMENTS)
        with running_server(python, models[0], log, arguments, UNPINNED) as real:
            yield kind, real.url


@pytest.fixture
async def adapter_make(adapter_endpoint: tuple[str, str | None], models: list[Path]) -> AsyncIterator[EngineMaker]:
    """``await adapter_make()``: an engine that serves adapters, and the base as version 0."""
    kind, url = adapter_endpoint
    config = AdapterConfig(rank=RANK, alpha=ALPHA)
    maker = EngineMaker(kind, url, models, AdapterSettings(config=config, kept_versions=3))
    yield maker
    await maker.aclose()


@pytest.fixture
async def make(endpoint: tuple[str, str | None], models: list[Path]) -> AsyncIterator[EngineMaker]:
    kind, url = endpoint
    maker = EngineMaker(kind, url, models)
    yield maker
    await maker.aclose()


@pytest.fixture
async def engine(make: EngineMaker) -> Engine:
    return await make()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.when == "call" and "test_engine_contract" in report.nodeid:
        kind = next((k for k in (*ADAPTER_KINDS, *KINDS) if f"[{k}" in report.nodeid), None)
        if kind is not None:
            _PASSED[f"{kind} {report.outcome}"] += 1


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _PASSED:
        counts = ", ".join(f"{name} {count}" for name, count in sorted(_PASSED.items()))
        terminalreporter.write_line(f"engine contract, cases by engine: {counts}")
