"""How far a running call is ahead of the tokens that its caller has saved.

An engine samples on while its caller saves: the tokens between the two are lost with the caller. A call may state a
limit. Before every chunk the engine checks that the whole chunk fits under it, and otherwise holds the call until the
caller has acknowledged more. A held call keeps its slot and its cache for a bounded time, then it ends as interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollmesh.types import GenerationCall

_HOLD_SECONDS = 2.0
_CONTENDED_HOLD_SECONDS = 0.25


def hold_seconds(*, contended: bool) -> float:
    """Return how long a call may be held; ``contended`` while other calls wait for a slot, for cache or for a load."""
    return _CONTENDED_HOLD_SECONDS if contended else _HOLD_SECONDS


@dataclass(slots=True, eq=False, kw_only=True)
class Backlog:
    """Length of one call's context in the engine, and how much of it the caller has made durable."""

    chunk_token_count: int
    limit: int
    """Most tokens sampled and not acknowledged; 0 is no limit."""
    sampled: int
    """Tokens of the context, prompt included, with those that the call has delivered."""
    durable: int
    """Of these, the first ones that are safe; the context that a call begins with is."""

    @classmethod
    def of(cls, call: GenerationCall) -> Self:
        """Start with nothing sampled."""
        context = len(call.context_ids)
        return cls(
            chunk_token_count=call.chunk_token_count,
            limit=call.unacknowledged_token_limit,
            sampled=context,
            durable=context,
        )

    @property
    def blocked(self) -> bool:
        """Whether another chunk might go beyond the limit."""
        return 0 < self.limit < self.sampled - self.durable + self.chunk_token_count

    def add(self, token_count: int) -> None:
        """Count the tokens of a chunk."""
        self.sampled += token_count

    def acknowledge(self, context_token_count: int) -> None:
        """Take a report; late ones change nothing, and none vouches for tokens that are still to come."""
        self.durable = max(self.durable, min(context_token_count, self.sampled))
