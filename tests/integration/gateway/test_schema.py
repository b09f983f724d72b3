"""The gateway answers as its OpenAPI document promises, to requests within and outside of the schema."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from ...kit.schema_requests import ask_everything, wrong_methods
from .gateway_scene import RunningGateway, Scene


async def test_every_answer_is_one_that_the_document_promises(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    await scene.admit(2)
    await scene.store.trajectories.lease(scene.session, 2)
    await scene.append("e0-0.0", 0, scene.segment("1 + 2 = 3 ,"))
    await scene.store.trajectories.fail(scene.session, [("e0-0.1", "broken")])
    gateway = started(run_file)
    token = (Path(scene.config.folder) / "gateway-token").read_text()
    document = f"{gateway.url}api/v1/openapi.json"
    asked = await asyncio.to_thread(ask_everything, document, token, "/api/v1/")
    assert asked >= 18
    assert await asyncio.to_thread(wrong_methods, document, token, "/") == []
    assert gateway.process.poll() is None
    assert "request_failed" not in gateway.log.read_text()
