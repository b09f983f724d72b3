"""One run for the tests that leave it as it was, and a maker of others."""

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
from .tool_model import trained

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


@pytest.fixture
async def make_tools_mesh(
    server: EmbeddedServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Callable[..., Any]]:
    """``await make_tools_mesh(data={...})``: a run of the model that calls tools, with these sections changed."""
    source = trained(tmp_path_factory.getbasetemp() / "tool-model")

    def write(folder: Path, seed: int) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        for file in source.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        return folder

    async with AsyncExitStack() as stack:

        async def make(**sections: Any) -> AgentMesh:
            base: dict[str, Any] = {
                "rollout": {"agent": {"contexts": "free"}, "max_new_tokens": 700},
                "generator": {"max_context_tokens": 900},
                "agents": {"renderer": "qwen3"},
            }
            return await stack.enter_async_context(
                agent_mesh(tmp_path / tmp_path.name, server, write=write, **base, **sections)
            )

        yield make


@pytest.fixture
async def tools_mesh(make_tools_mesh: Callable[..., Any]) -> AgentMesh:
    mesh: AgentMesh = await make_tools_mesh()
    return mesh
