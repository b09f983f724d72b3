"""How far running calls are ahead of what their callers have saved.

A generator streams ahead while its caller waits for a save: what lies between the two is lost with the caller. A call
may ask for a limit; once the next chunk might go beyond it, the call has to end.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rollmesh.types import GenerationCall


@dataclass(slots=True, eq=False, kw_only=True)
class Backlog:
    """One call: how long its context is here, and how much of it the caller has made durable."""

    chunk_token_count: int
    limit: int
    """Most tokens sampled and not acknowledged; 0 is no limit."""
    sampled: int
    """Tokens of the context, prompt included, with what the call has sampled."""
    durable: int
    """Of these, the first ones that are safe; what a call begins with is."""
    held_back: bool = False
    """Whether the call has been told to end."""

    def add(self, token_count: int) -> bool:
        """Count a chunk; True, once, when a further one might go beyond the limit: the call must be told to end."""
        self.sampled += token_count
        behind = 0 < self.limit < self.sampled - self.durable + self.chunk_token_count
        told, self.held_back = self.held_back, self.held_back or behind
        return behind and not told

    def acknowledge(self, context_token_count: int) -> None:
        """Take a report; late ones change nothing, and none vouches for tokens that are still to come."""
        self.durable = max(self.durable, min(context_token_count, self.sampled))


@dataclass(slots=True)
class Acknowledgements:
    """The backlogs of the calls under way; one that was given up may still end while the next of its name runs."""

    _calls: dict[str, set[Backlog]] = field(default_factory=dict)

    @contextmanager
    def of(self, call: GenerationCall, limit: int) -> Iterator[Backlog]:
        """Follow a call while it runs."""
        context = len(call.context_ids)
        backlog = Backlog(chunk_token_count=call.chunk_token_count, limit=limit, sampled=context, durable=context)
        calls = self._calls.setdefault(call.trajectory_id, set())
        calls.add(backlog)
        try:
            yield backlog
        finally:
            calls.discard(backlog)
            if not calls and self._calls.get(call.trajectory_id) is calls:
                del self._calls[call.trajectory_id]

    def acknowledge(self, trajectory_id: str, context_token_count: int) -> None:
        """Take a report; one about a call that has ended is of no use any more."""
        for backlog in self._calls.get(trajectory_id, ()):
            backlog.acknowledge(context_token_count)
