"""What a span is, recorded or not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Literal, Protocol, Self

from rollmesh.runtime.tracecontext import TraceContext

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Attribute = str | int | float | bool | Sequence[str] | Sequence[int]

MOST_LINKS = 128
"""Links of one span; OpenTelemetry drops further ones."""


class Span:
    """One piece of work; use it as a context manager. This one is not recorded: the traces are off, or not sampled."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """What children of this span name as their parent; empty when it is not recorded."""
        return ""

    def set(self, **attributes: Attribute) -> None:
        """Add facts."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Note a moment within the span."""

    def fail(self, message: str) -> None:
        """Mark the span as failed."""

    def end(self) -> None:
        """End the span, if it has not ended."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            cancelled = isinstance(error, asyncio.CancelledError | GeneratorExit)
            if cancelled:
                self.set(cancelled=True)
            else:
                self.fail(f"{type(error).__name__}: {error}")
        self.end()


NOTHING = Span()


class Recorder(Protocol):
    """Where recorded spans go: OpenTelemetry (``otel.py``)."""

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
        """A span under ``place``, or the very span that ``place`` names (``root``)."""

    def shutdown(self) -> None:
        """Deliver what is left, within a few seconds."""
