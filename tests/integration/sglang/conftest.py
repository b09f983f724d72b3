"""Runs whose generator has an SGLang server of its own: the fast stand-in, or the real one where it is installed."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.store import EmbeddedServer

from ...kit.environments import python_of
from ...sglang_cpu.server import FORKING, START_SECONDS
from ..generator.generator_run import GeneratorRun, runs

_TESTS = Path(__file__).parents[2]
_FAKES = _TESTS / "fakes"
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
def real() -> dict[str, Any]:
    """Options of the real server; skips where it is not installed."""
    environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", **FORKING}
    return {"python": str(python_of("sglang-cpu")), "environment": environment}


@pytest.fixture(scope="session")
def stand_in() -> dict[str, Any]:
    """Options of the stand-in: found first on the server's path."""
    return {"environment": {"PYTHONPATH": str(_FAKES), "OMP_NUM_THREADS": "1"}}


@pytest.fixture
async def make_run(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await make_run(stand_in, slots=4)``: a run whose generators start such a server."""
    async with runs(server, tmp_path) as make:

        async def with_server(sglang: dict[str, Any], **generator: Any) -> GeneratorRun:
            server = {"start_timeout_seconds": START_SECONDS, **sglang}
            return await make(**{"engine": "sglang", "slots": 32, "sglang": server, **generator})

        yield with_server
