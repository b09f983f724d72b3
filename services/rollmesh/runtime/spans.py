"""Trace contexts and spans, recorded or not."""

import asyncio
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, Self

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LOW_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """Position in a trace, the traceparent of W3C Trace Context."""

    trace_id: int
    """Trace id, 128 bits."""
    span_id: int
    """Id of the parent of new spans, 64 bits."""

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """Parse a traceparent; returns None for an empty or malformed one, which starts no trace."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        trace_id, span_id = int(match.group(1), 16), int(match.group(2), 16)
        return cls(trace_id=trace_id, span_id=span_id) if trace_id and span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def traceparent_of(run: str, trajectory_id: str) -> str:
    """Return the W3C traceparent of a trajectory: the same in every service and for every worker of the trajectory."""
    return _derived(f"{run}:{trajectory_id}")


def traceparent_of_step(run: str, train_step: int) -> str:
    """Return the W3C traceparent of a train step: cut, claim, training, publication and the loads of its policy."""
    return _derived(f"{run}:train-step:{train_step}")


def _derived(name: str) -> str:
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return f"00-{digest[:32]}-{digest[32:]}-01"


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Tell whether a trace is recorded; every service with the same ratio decides the same.

    The rule is that of OpenTelemetry's TraceIdRatioBased sampler: the low 64 bits are below ratio * 2^64.
    """
    return (trace_id & _LOW_BITS) < round(ratio * (1 << 64))


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
