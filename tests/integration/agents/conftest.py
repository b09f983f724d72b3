"""One run for the tests that leave it as it was, and a maker of others."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils.logging import disable_progress_bar

from rollmesh.store import EmbeddedServer

from .agent_mesh import AgentMesh, agent_mesh

_NUMBERS = itertools.count()


@pytest.fixture(scope="session", autouse=True)
def _quiet() -> None:
    torch.set_num_threads(1)
    disable_progress_bar()


@pytest.fixture
async def make_mesh(server: EmbeddedServer, tmp_path: Path) -> AsyncIterator[Callable[..., Any]]:
    """``await make_mesh(rollout={...})``: a run with these sections changed."""
    async with AsyncExitStack() as stack:

        async def make(**sections: Any) -> AgentMesh:
            folder = tmp_path / f"agents{next(_NUMBERS)}"
            return await stack.enter_async_context(agent_mesh(folder, server, **sections))

        yield make
