"""Spans of one process, recorded by the real SDK into memory."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from pydantic import ValidationError

from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.spans import NOTHING, TraceContext, is_sampled, traceparent_of
from rollmesh.runtime.tracing import Tracer, recorded_traces, tracer

otel = pytest.importorskip("rollmesh.runtime.otel")
exporters = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")

HOME = traceparent_of("run", "e0-0.0")


@pytest.fixture
async def memory() -> AsyncIterator[tuple[Tracer, object]]:
    exporter = exporters.InMemorySpanExporter()
    whose = {"service": "rollout", "instance": "rollout-1", "run": "run"}
    recorder = otel.OtelRecorder(exporter, **whose)
    async with recorded_traces(TelemetryConfig(), **whose, recorder=recorder) as spans:
        yield spans, exporter


def finished(memory) -> dict[str, object]:
    memory[0]._recorder._provider.force_flush()
    return {span.name: span for span in memory[1].get_finished_spans()}


async def test_children_of_any_process_join_the_trace_whose_root_comes_last(memory) -> None:
    spans = memory[0]
    with spans.span("attempt", HOME, kind="client", attempt=1) as attempt:
        with spans.span("generate", attempt.traceparent) as call:
            call.event("segment", policy_version=3)
    spans.span("trajectory", HOME, root=True, start_ns=5).end()
    found = finished(memory)
    home = TraceContext.parse(HOME)
    assert {span.context.trace_id for span in found.values()} == {home.trace_id}
    assert found["trajectory"].parent is None
    assert found["trajectory"].context.span_id == home.span_id
    assert found["trajectory"].start_time == 5
    assert found["attempt"].parent.span_id == home.span_id
    assert found["generate"].parent.span_id == found["attempt"].context.span_id
    assert found["attempt"].attributes == {"rollmesh.attempt": 1}
    assert found["generate"].events[0].attributes == {"rollmesh.policy_version": 3}
    assert found["attempt"].resource.attributes["service.name"] == "rollmesh-rollout"
    assert found["attempt"].resource.attributes["rollmesh.run"] == "run"


async def test_an_error_marks_its_span_and_a_cancelled_span_is_no_failure(memory) -> None:
    for error in (ValueError("broken"), asyncio.CancelledError()):
        with pytest.raises(type(error)), memory[0].span(type(error).__name__, HOME):
            raise error
    found = finished(memory)
    assert found["ValueError"].status.description == "ValueError: broken"
    assert found["CancelledError"].status.is_ok
    assert found["CancelledError"].attributes == {"rollmesh.cancelled": True}


async def test_work_without_a_trace_context_is_not_recorded(memory) -> None:
    for traceparent in ("", "00-xyz", f"00-{0:032x}-{0:016x}-01"):
        assert memory[0].span("call", traceparent) is NOTHING
    assert finished(memory) == {}


async def test_without_an_endpoint_nothing_is_recorded_and_nothing_is_installed() -> None:
    before = tracer()
    async with recorded_traces(TelemetryConfig(), service="reward", instance="reward-0", run="run") as spans:
        assert spans is before
        assert not spans.on
        with spans.span("score", HOME) as span:
            span.set(value=1.0)
            span.event("x")
            assert span is NOTHING
            assert span.traceparent == ""


def test_every_service_picks_the_same_share_of_the_traces() -> None:
    places = [TraceContext.parse(traceparent_of("run", f"e0-{index}.0")) for index in range(4000)]
    share = sum(is_sampled(place.trace_id, 0.25) for place in places) / len(places)
    assert 0.22 < share < 0.28
    assert all(is_sampled(place.trace_id, 1.0) for place in places)
    assert not any(is_sampled(place.trace_id, 0.0) for place in places)
    picked = otel_sampler(0.25)
    assert all(is_sampled(place.trace_id, 0.25) == picked(place.trace_id) for place in places)


def otel_sampler(ratio: float):
    from opentelemetry.sdk.trace.sampling import TraceIdRatioBased

    sampler = TraceIdRatioBased(ratio)
    return lambda trace_id: sampler.should_sample(None, trace_id, "x").decision.is_sampled()


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ValidationError, match="otlp_endpoint"):
        TelemetryConfig(otlp_endpoint="collector:4318")
