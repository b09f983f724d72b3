"""Which trace a piece of work belongs to: a pure function of the run and a name, so every service knows it by itself.

A trajectory and a train step each have one trace. Its id comes from a digest, not from a random number that would have
to be stored: a worker that takes over a trajectory, or a trainer that replays a step, goes on in the same trace.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass
from typing import Self

_TRACEPARENT = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}")
_LOW_BITS = (1 << 64) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceContext:
    """A place in a trace: what W3C calls a traceparent."""

    trace_id: int
    """128 bits."""
    span_id: int
    """64 bits: the span that new spans become children of."""

    @classmethod
    def parse(cls, traceparent: str) -> Self | None:
        """The place that a traceparent names; None for an empty or malformed one, which starts no trace."""
        match = _TRACEPARENT.fullmatch(traceparent)
        if match is None:
            return None
        trace_id, span_id = int(match.group(1), 16), int(match.group(2), 16)
        return cls(trace_id=trace_id, span_id=span_id) if trace_id and span_id else None

    def __str__(self) -> str:
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"


def traceparent_of(run: str, trajectory_id: str) -> str:
    """W3C trace context of a trajectory: the same in every service and for every worker that goes on with it."""
    return _derived(f"{run}:{trajectory_id}")


def traceparent_of_step(run: str, train_step: int) -> str:
    """W3C trace context of a train step: cut, claim, training, publication and the loads of its policy."""
    return _derived(f"{run}:train-step:{train_step}")


def _derived(name: str) -> str:
    digest = hashlib.blake2b(name.encode(), digest_size=24).hexdigest()
    return f"00-{digest[:32]}-{digest[32:]}-01"


def is_sampled(trace_id: int, ratio: float) -> bool:
    """Whether a trace is one of the share that is recorded; every service with the same ratio says the same.

    The rule of OpenTelemetry's TraceIdRatioBased sampler: the low 64 bits below ratio * 2^64.
    """
    return (trace_id & _LOW_BITS) < round(ratio * (1 << 64))
