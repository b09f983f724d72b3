"""Runs whose generator has an SGLang server of its own: the fast stand-in, or the real one where it is installed."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.wire.generation_client import GenerationClient

from ...sglang_cpu.server import FORKING, START_SECONDS
from ..generator import generator_run

_TESTS = Path(__file__).parents[2]
_FAKES = _TESTS / "fakes"
_INSTALL = _TESTS / "sglang_cpu" / "install.py"
_NUMBERS = itertools.count()
_TEST_SECONDS = 1500
"""Every test with a server waits for its start, which takes minutes on busy cores."""
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every deadline inside of a test passes first and says what it waited for."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()


@pytest.fixture(scope="session")
def kit() -> ModuleType:
    """The run of the generator's own tests: the trainer's part is played there."""
    return generator_run


@pytest.fixture(scope="session")
def real() -> dict[str, Any]:
    """Options of the real server; skips where it is not installed."""
    check = subprocess.run([sys.executable, _INSTALL, "--check"], capture_output=True, text=True)
    if check.returncode:
        pytest.skip(f"the real SGLang server is not installed: {(check.stdout + check.stderr).strip()}")
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **FORKING}
    return {"python": check.stdout.strip(), "environment": environment}


@pytest.fixture(scope="session")
def stand_in() -> dict[str, Any]:
    """Options of the stand-in: found first on the server's path."""
    return {"environment": {"PYTHONPATH": str(_FAKES), "OMP_NUM_THREADS": "1"}}


@pytest.fixture
async def make_run(server: EmbeddedServer, tmp_path: Path, kit: ModuleType) -> AsyncIterator[Callable[..., Any]]:
    """``await make_run(stand_in, slots=4)``: a run whose generators start such a server."""
    async with AsyncExitStack() as stack:

        async def make(sglang: dict[str, Any], **generator: Any) -> Any:
            fields = {"engine": "sglang", "slots": 32, "sglang": {"start_timeout_seconds": START_SECONDS, **sglang}}
            config = kit.make_config(tmp_path / f"run{next(_NUMBERS)}", server, **{**fields, **generator})
            store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
            client = await stack.enter_async_context(GenerationClient())
            run = kit.GeneratorRun(config, store, open_checkpoints(config), client)
            stack.push_async_callback(run.aclose)
            return run

        yield make
