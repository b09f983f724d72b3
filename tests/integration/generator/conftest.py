"""A real server and fresh runs for the generator's tests."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.store import EmbeddedServer, TrajectoryStore
from rollmesh.wire.generation_client import GenerationClient

from .generator_run import GeneratorRun, make_config

_NUMBERS = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()


@pytest.fixture
async def make_run(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await make_run(pace=SLOW)``: a run with these options of ``make_config``, without policies and generators."""
    async with AsyncExitStack() as stack:

        async def make(**options: Any) -> GeneratorRun:
            config = make_config(tmp_path / f"run{next(_NUMBERS)}", server, **options)
            store = await stack.enter_async_context(await TrajectoryStore.connect(config.store, config.name))
            client = await stack.enter_async_context(GenerationClient())
            run = GeneratorRun(config, store, open_checkpoints(config), client)
            stack.push_async_callback(run.aclose)
            return run

        yield make
