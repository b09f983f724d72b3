"""Whatever a client sends to /v1, the answers are those that the OpenAPI document promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rollmesh.runtime.addresses import free_port

from ...kit.schema_requests import ask_everything, wrong_methods
from .agent_mesh import TOKEN, AgentMesh, agents_process


# The mesh runs in this process and draws random numbers while hypothesis makes requests in a thread.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("program", ["agent", "single_turn"])
async def test_every_answer_of_v1_is_one_that_the_document_promises(
    make_mesh: Callable[..., Any], program: str
) -> None:
    # Room for every session that is asked for: one without room waits half a minute.
    pool = {"pool_size": 20 if program == "agent" else 8}
    mesh: AgentMesh = await make_mesh(rollout={"program": program}, schedule=pool)
    port = free_port()
    fixed = {"model": mesh.config.name, "wait_seconds": 0.1}
    async with agents_process(mesh, port) as process:
        document = f"http://127.0.0.1:{port}/v1/openapi.json"
        everywhere = "/(inference/)?v1/"
        asked = await asyncio.to_thread(ask_everything, document, TOKEN, everywhere, fixed, accepts_valid=False)
        assert asked == 11
        assert await asyncio.to_thread(wrong_methods, document, TOKEN, "/v1/") == []
        assert process.poll() is None
    assert "request_failed" not in (Path(mesh.config.folder) / "agents.log").read_text()
