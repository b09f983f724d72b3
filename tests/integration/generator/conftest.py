"""A real server and fresh runs for the generator's tests."""

from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.store import EmbeddedServer

from .generator_run import runs


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()


@pytest.fixture
async def make_run(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await make_run(pace=SLOW)``: a run with these options of ``make_config``, without policies and generators."""
    async with runs(server, tmp_path) as make:
        yield make
