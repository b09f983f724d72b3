"""Spans of the mesh: one trace per trajectory and per train step; almost no cost when tracing is not configured.

There is one tracer per process, like the logging configuration; ``recorded_traces`` installs it while a service runs.
Spans refer to their parent by its traceparent. They do not follow the current task: a call may begin in one task and
end in another, and its parent may be in another process.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from rollmesh.config.services import TelemetryConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.spans import (
    MOST_LINKS,
    NOTHING,
    Attribute,
    Kind,
    Span,
    TraceContext,
    is_sampled,
    traceparent_of_step,
)

if TYPE_CHECKING:
    from rollmesh.runtime.otel import OtelRecorder


class Tracer:
    """Factory of spans; without a recorder every span is ``NOTHING``."""

    __slots__ = ("_ratio", "_recorder", "_run")

    def __init__(self, recorder: "OtelRecorder | None" = None, *, run: str = "", ratio: float = 1.0) -> None:
        self._recorder = recorder
        self._run = run
        self._ratio = ratio

    @property
    def on(self) -> bool:
        """True when spans are recorded; check it before computing expensive attributes."""
        return self._recorder is not None

    def span(
        self,
        name: str,
        traceparent: str,
        *,
        root: bool = False,
        kind: Kind = "internal",
        links: Sequence[str] = (),
        start_ns: int | None = None,
        **attributes: Attribute,
    ) -> Span:
        """Start a child span of ``traceparent``, now or at ``start_ns`` (Unix nanoseconds).

        With ``root``, start the span that ``traceparent`` identifies. ``links`` are traceparents of related work; only
        sampled ones are recorded, up to ``MOST_LINKS``. Without a traceparent nothing is recorded.
        """
        if self._recorder is None:
            return NOTHING
        place = self._sampled(traceparent)
        if place is None:
            return NOTHING
        linked = list(islice(filter(None, map(self._sampled, links)), MOST_LINKS))
        return self._recorder.start(
            name, place, root=root, kind=kind, links=linked, start_ns=start_ns, attributes=attributes
        )

    def train_step(self, train_step: int) -> str:
        """Return the traceparent of a train step of this run; empty when nothing is recorded."""
        return "" if self._recorder is None else traceparent_of_step(self._run, train_step)

    def _sampled(self, traceparent: str) -> TraceContext | None:
        place = TraceContext.parse(traceparent)
        return place if place is not None and is_sampled(place.trace_id, self._ratio) else None


_tracer = Tracer()


def tracer() -> Tracer:
    """Return the tracer of this process, which records nothing unless ``recorded_traces`` is active."""
    return _tracer


@contextlib.asynccontextmanager
async def recorded_traces(
    config: TelemetryConfig, *, service: str, instance: str, run: str, recorder: "OtelRecorder | None" = None
) -> AsyncIterator[Tracer]:
    """Record spans of this process inside the context, and export the last ones at its end.

    Does nothing without ``telemetry.otlp_endpoint``, unless a ``recorder`` is given (tests). Raises ConfigError when
    the extra ``tracing`` is not installed.
    """
    global _tracer
    endpoint = config.otlp_endpoint
    if recorder is None and endpoint is not None:
        try:
            from rollmesh.runtime.otel import otlp_recorder
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"telemetry.otlp_endpoint={endpoint} requires the package {error.name}: pip install 'rollmesh[tracing]'"
            ) from error
        recorder = otlp_recorder(endpoint, service=service, instance=instance, run=run)
    if recorder is None:
        yield _tracer
        return
    before, _tracer = _tracer, Tracer(recorder, run=run, ratio=config.trace_ratio)
    try:
        yield _tracer
    finally:
        _tracer = before
        await asyncio.to_thread(recorder.shutdown)
