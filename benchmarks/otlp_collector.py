"""OpenTelemetry collector that keeps the spans of any number of processes, received over OTLP/HTTP."""

import gzip
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue


@dataclass(frozen=True)
class ReceivedSpan:
    """Span as it came over the wire; times in Unix nanoseconds."""

    service: str
    instance: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    links: frozenset[str]
    """Trace ids."""
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: tuple[tuple[str, dict[str, Any]], ...]


@dataclass
class Collector:
    """Spans that arrived so far; filled by the server's threads."""

    url: str = ""
    spans: list[ReceivedSpan] = field(default_factory=list)
    paths: set[str] = field(default_factory=set)

    def traces(self) -> dict[str, list[ReceivedSpan]]:
        """Return the spans by trace id."""
        found: dict[str, list[ReceivedSpan]] = {}
        for span in list(self.spans):
            found.setdefault(span.trace_id, []).append(span)
        return found

    def add(self, request: ExportTraceServiceRequest) -> None:
        """Keep the spans of a request."""
        for resource in request.resource_spans:
            whose = {a.key: _plain(a.value) for a in resource.resource.attributes}
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.spans.append(
                        ReceivedSpan(
                            service=whose["service.name"],
                            instance=whose["service.instance.id"],
                            name=span.name,
                            trace_id=span.trace_id.hex(),
                            span_id=span.span_id.hex(),
                            parent_id=span.parent_span_id.hex(),
                            links=frozenset(link.trace_id.hex() for link in span.links),
                            start_ns=span.start_time_unix_nano,
                            end_ns=span.end_time_unix_nano,
                            attributes={a.key: _plain(a.value) for a in span.attributes},
                            events=tuple((e.name, {a.key: _plain(a.value) for a in e.attributes}) for e in span.events),
                        )
                    )


def _plain(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    return [_plain(v) for v in value.array_value.values] if kind == "array_value" else getattr(value, kind or "x", None)


@contextmanager
def collector() -> Iterator[Collector]:
    """Receive spans at a free loopback port during the block."""
    kept = Collector()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            kept.paths.add(self.path)
            kept.add(ExportTraceServiceRequest.FromString(body))
            answer = ExportTraceServiceResponse().SerializeToString()
            self.send_response(200)
            self.send_header("Content-Type", "application/x-protobuf")
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Log no requests."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        kept.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield kept
        finally:
            server.shutdown()
            thread.join()
