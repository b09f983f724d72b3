"""Count of the tokens that a running call has sampled and its caller has not saved.

The engine continues to sample while the caller saves. If the caller crashes, its unsaved tokens are lost, so a call may
set a limit. Before every chunk the engine checks that the whole chunk fits under the limit. If not, it holds the call
until the caller acknowledges more tokens. A held call keeps its slot and its cache for a bounded time, then it ends as
interrupted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from rollmesh.types import GenerationCall

_HOLD_SECONDS = 2.0
_CONTENDED_HOLD_SECONDS = 0.25


def hold_seconds(*, contended: bool) -> float:
    """Return the seconds a call may be held; ``contended`` while other calls wait for a slot, cache or a load."""
    return _CONTENDED_HOLD_SECONDS if contended else _HOLD_SECONDS


@dataclass(slots=True, eq=False, kw_only=True)
class Backlog:
    """Sampled and durable tokens of one call's context."""

    chunk_token_count: int
    limit: int
    """Maximum number of sampled tokens that are not acknowledged; 0 is no limit."""
    sampled: int
    """Tokens of the context: the prompt, the response at the start of the call and the delivered tokens."""
    durable: int
    """Leading tokens of the context that are durable; includes the context at the start of the call."""

    @classmethod
    def of(cls, call: GenerationCall) -> Self:
        """Create the backlog of a new call, with no token sampled."""
        context = len(call.context_ids)
        return cls(
            chunk_token_count=call.chunk_token_count,
            limit=call.unacknowledged_token_limit,
            sampled=context,
            durable=context,
        )

    @property
    def blocked(self) -> bool:
        """True if another chunk might exceed the limit."""
        return 0 < self.limit < self.sampled - self.durable + self.chunk_token_count

    def add(self, token_count: int) -> None:
        """Count the tokens of a chunk."""
        self.sampled += token_count

    def acknowledge(self, context_token_count: int) -> None:
        """Record the durable tokens; a stale count changes nothing, and a count never exceeds the sampled tokens."""
        self.durable = max(self.durable, min(context_token_count, self.sampled))
