"""Whatever a client sends within or outside of the schema, the answers are those that the OpenAPI document promises."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import checks
from schemathesis.checks import CheckFunction

from .gateway_scene import RunningGateway, Scene

EXAMPLES = 12
"""Per operation."""


async def test_every_answer_is_one_that_the_document_promises(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    await scene.admit(2)
    await scene.store.lease(scene.session, 2)
    await scene.append("e0-0.0", 0, scene.segment("1 + 2 = 3 ,"))
    await scene.store.fail(scene.session, [("e0-0.1", "broken")])
    gateway = started(run_file)
    token = (Path(scene.config.folder) / "gateway-token").read_text()
    asked = await asyncio.to_thread(ask_everything, gateway.url, token)
    assert asked >= 18
    assert gateway.process.poll() is None
    assert "request_failed" not in gateway.log.read_text()


def ask_everything(url: str, token: str) -> int:
    """Generated requests for every operation of the REST API but the endless one; returns how many operations."""
    schema = schemathesis.openapi.from_url(f"{url}api/v1/openapi.json")
    schema = schema.include(path_regex="^/api/v1/").exclude(path="/api/v1/events")
    promised: list[CheckFunction] = [
        checks.not_a_server_error,
        schemathesis.specs.openapi.checks.status_code_conformance,
        schemathesis.specs.openapi.checks.content_type_conformance,
        schemathesis.specs.openapi.checks.response_schema_conformance,
    ]
    count = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        count += 1

        @given(case=operation.as_strategy())
        @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
        def ask(case: Any) -> None:
            case.call_and_validate(headers={"Authorization": f"Bearer {token}"}, checks=promised, timeout=60)

        ask()
    return count
