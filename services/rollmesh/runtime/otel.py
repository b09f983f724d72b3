"""Spans of the OpenTelemetry SDK, sent to a collector in batches (OTLP over HTTP). Requires the extra ``tracing``."""

import logging
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from opentelemetry import context as otel_context
from opentelemetry import trace as api
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.id_generator import IdGenerator, RandomIdGenerator
from opentelemetry.sdk.trace.sampling import ALWAYS_ON

import rollmesh
from rollmesh.runtime.logging import LineLimit, get_logger
from rollmesh.runtime.spans import MOST_LINKS, Attribute, Kind, Span, TraceContext

_QUEUE_SPANS = 8192
"""Maximum number of spans that wait for the collector; while it is unreachable, older spans are dropped."""
_BATCH_SPANS = 512
_BATCH_MILLISECONDS = 1000
"""Interval between two exports; a killed process loses at most the spans of its last second."""
_EXPORT_SECONDS = 5.0
_SHUTDOWN_SECONDS = 3.0
"""Limit for the last export; an unreachable collector must not use up the grace period of a service."""
_MOST_EVENTS = 128
_WARNING_INTERVAL_SECONDS = 60.0


class RecordedSpan(Span):
    """A span of the SDK."""

    __slots__ = ("_span",)

    def __init__(self, span: api.Span) -> None:
        self._span = span

    @property
    def traceparent(self) -> str:
        place = self._span.get_span_context()
        return str(TraceContext(trace_id=place.trace_id, span_id=place.span_id))

    def set(self, **attributes: Attribute) -> None:
        self._span.set_attributes(_named(attributes))

    def event(self, name: str, **attributes: Attribute) -> None:
        self._span.add_event(name, _named(attributes))

    def fail(self, message: str) -> None:
        self._span.set_status(api.StatusCode.ERROR, message)

    def end(self) -> None:
        if self._span.is_recording():
            self._span.end()


class _Ids(IdGenerator):
    """Generator of random ids; a root span gets the ids of its traceparent, which its children refer to."""

    def __init__(self) -> None:
        self._random = RandomIdGenerator()
        self._preset = threading.local()

    def preset(self, place: TraceContext) -> None:
        self._preset.place = place

    def generate_trace_id(self) -> int:
        place: TraceContext | None = getattr(self._preset, "place", None)
        return self._random.generate_trace_id() if place is None else place.trace_id

    def generate_span_id(self) -> int:
        place: TraceContext | None = getattr(self._preset, "place", None)
        if place is None:
            return self._random.generate_span_id()
        self._preset.place = None
        return place.span_id


class _SdkLogHandler(logging.Handler):
    """Handler that logs SDK warnings (collector unreachable, spans dropped), each at most once per minute."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = LineLimit(seconds=_WARNING_INTERVAL_SECONDS)

    def emit(self, record: logging.LogRecord) -> None:
        if self._limit.suppressed(str(record.msg)) is not None:
            get_logger("tracing").warning("traces_not_delivered", message=record.getMessage())


class OtelRecorder:
    """Recorder with a private tracer provider; the global provider of OpenTelemetry stays unchanged."""

    def __init__(self, exporter: SpanExporter, *, service: str, instance: str, run: str) -> None:
        self._ids = _Ids()
        resource = Resource.create(
            {
                "service.name": f"rollmesh-{service}",
                "service.namespace": "rollmesh",
                "service.instance.id": instance,
                "service.version": rollmesh.__version__,
                "rollmesh.run": run,
            }
        )
        self._provider = TracerProvider(
            sampler=ALWAYS_ON,  # Tracer has sampled already
            resource=resource,
            id_generator=self._ids,
            span_limits=SpanLimits(max_links=MOST_LINKS, max_events=_MOST_EVENTS),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                exporter,
                max_queue_size=_QUEUE_SPANS,
                schedule_delay_millis=_BATCH_MILLISECONDS,
                max_export_batch_size=_BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("rollmesh", rollmesh.__version__)
        self._log_handler = _SdkLogHandler()
        self._sdk_log = logging.getLogger("opentelemetry")
        self._sdk_log.addHandler(self._log_handler)
        self._sdk_log.propagate = False

    def start(
        self,
        name: str,
        place: TraceContext,
        *,
        root: bool,
        kind: Kind,
        links: Sequence[TraceContext],
        start_ns: int | None,
        attributes: dict[str, Any],
    ) -> Span:
        """Start a child span of ``place``, or with ``root`` the span that ``place`` identifies."""
        parent = otel_context.Context()
        if root:
            self._ids.preset(place)
        else:
            parent = api.set_span_in_context(api.NonRecordingSpan(_span_context(place)), parent)
        return RecordedSpan(
            self._tracer.start_span(
                name,
                parent,
                api.SpanKind[kind.upper()],
                _named(attributes),
                [api.Link(_span_context(link)) for link in links],
                start_time=time.time_ns() if start_ns is None else start_ns,
            )
        )

    def shutdown(self) -> None:
        """Export the remaining spans, for at most ``_SHUTDOWN_SECONDS``."""
        last = threading.Thread(target=self._provider.shutdown, name="last-spans", daemon=True)
        last.start()
        last.join(_SHUTDOWN_SECONDS)
        # Later messages of SDK threads are dropped: without any handler they would go to standard error.
        self._sdk_log.addHandler(logging.NullHandler())
        self._sdk_log.removeHandler(self._log_handler)


def otlp_recorder(endpoint: str, *, service: str, instance: str, run: str) -> OtelRecorder:
    """Create a recorder that sends to the collector at ``endpoint``; a URL without a path gets ``/v1/traces``.

    Headers and certificates for the collector come from the environment variables of OpenTelemetry
    (``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_EXPORTER_OTLP_CERTIFICATE``, ...).
    """
    url = endpoint if urlsplit(endpoint).path.strip("/") else f"{endpoint.rstrip('/')}/v1/traces"
    exporter = OTLPSpanExporter(endpoint=url, timeout=_EXPORT_SECONDS)
    return OtelRecorder(exporter, service=service, instance=instance, run=run)


def _span_context(place: TraceContext) -> api.SpanContext:
    return api.SpanContext(place.trace_id, place.span_id, is_remote=True, trace_flags=api.TraceFlags(0x01))


def _named(attributes: dict[str, Any]) -> dict[str, Any]:
    return {f"rollmesh.{name}": value for name, value in attributes.items()}
