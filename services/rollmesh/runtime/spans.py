"""Spans, recorded or not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Literal, Self

Kind = Literal["internal", "client", "server", "producer", "consumer"]
Attribute = str | int | float | bool | Sequence[str] | Sequence[int]

MOST_LINKS = 128
"""Maximum number of links of one span; OpenTelemetry drops further links."""


class Span:
    """One unit of work, used as a context manager. This base class records nothing: traces are off or not sampled."""

    __slots__ = ()

    @property
    def traceparent(self) -> str:
        """Traceparent for the children of this span; empty when the span is not recorded."""
        return ""

    def set(self, **attributes: Attribute) -> None:
        """Add attributes."""

    def event(self, name: str, **attributes: Attribute) -> None:
        """Add an event to the span."""

    def fail(self, message: str) -> None:
        """Mark the span as failed."""

    def end(self) -> None:
        """End the span unless it has ended."""

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
