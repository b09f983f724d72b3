"""Traces whose collector does not answer."""

from __future__ import annotations

import asyncio
import io
import json
import time

import pytest

from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.logging import configure_logging
from rollmesh.runtime.spans import traceparent_of
from rollmesh.runtime.tracing import recorded_traces

otel = pytest.importorskip("rollmesh.runtime.otel")


async def test_an_unreachable_collector_is_logged_once_and_delays_no_service(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(otel, "_EXPORT_SECONDS", 90.0)  # how long the SDK tries again
    config = TelemetryConfig(otlp_endpoint=f"http://127.0.0.1:{free_port()}")
    log = io.StringIO()
    configure_logging(config, service="reward-0", run="run", stream=log)
    async with recorded_traces(config, service="reward", instance="reward-0", run="run") as spans:
        for index in range(20):
            spans.span("score", traceparent_of("run", f"e0-{index}.0")).end()
        async with asyncio.timeout(60.0):
            while "traces_not_delivered" not in log.getvalue():
                await asyncio.sleep(0.05)
        started = time.monotonic()
    assert time.monotonic() - started < 45.0, "the service waits for three seconds, not for the SDK"
    lines = [json.loads(line) for line in log.getvalue().splitlines()]
    said = [line for line in lines if line["event"] == "traces_not_delivered"]
    assert said
    assert all(line["level"] == "warning" for line in said)
