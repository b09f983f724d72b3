"""Goodput: the share of what the generators sampled that was trained on.

Both sides belong to the trainer's state: the total of trained tokens and the total of sampled ones are saved with the
weights and restored with them, so a Redis that comes back empty takes nothing from either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollmesh.types import GeneratorRecord

MOST_REMEMBERED = 10_000
"""Generators whose registered totals are remembered: all that live, and many that may come back."""


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """Tokens that the generators of a run have sampled, from the total that each of them registers."""

    total: int | None = 0
    """Since the run began; None where that is not known: an older release began it, or a generator of one is in it."""
    seen: dict[str, int] = field(default_factory=dict)
    """Registered total by instance, the longest unseen first."""

    def take(self, records: Sequence[GeneratorRecord]) -> None:
        """Add what was sampled since each generator was last seen, be it by the trainer before this one."""
        for record in records:
            now = record.work.generated_tokens
            if now is None:
                if record.work.prefill_tokens:
                    self.total = None
                continue
            before = self.seen.pop(record.instance_id, 0)
            # Redis may have come back with an older record.
            self.seen[record.instance_id] = max(now, before)
            if self.total is not None:
                self.total += max(0, now - before)
        for instance_id in list(self.seen)[:-MOST_REMEMBERED]:
            del self.seen[instance_id]

    def goodput(self, trained_tokens: int) -> float | None:
        """Trained tokens per sampled one, 0..1; None where it is not known.

        Fewer sampled tokens than trained ones are a count that lacks some: of generators that were never seen.
        """
        if not self.total or trained_tokens > self.total:
            return None
        return trained_tokens / self.total

    def to_json(self) -> dict[str, Any]:
        """For the trainer state; a copy. Pairs, because the state sorts the names of an object."""
        return {"total": self.total, "seen": [list(pair) for pair in self.seen.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None, *, trained_tokens: int) -> Self:
        """Back from ``to_json``; None is the state of an older release, which had trained this many tokens."""
        if data is None:
            return cls(total=None if trained_tokens else 0)
        return cls(total=data["total"], seen=dict(data["seen"]))
