"""Goodput: the share of the sampled tokens that was trained on.

Both totals, of trained and of sampled tokens, are part of the trainer's state. They are saved and restored with the
weights, so an empty Redis does not reduce them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollmesh.types import GeneratorRecord

MAX_REMEMBERED = 10_000
"""Maximum number of generators whose totals are stored: all current ones, and many that may return."""


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """Tokens that the generators of a run have sampled, from the total that each generator registers."""

    total: int | None = 0
    """Total since the start of the run; None if an older release started the run or serves a generator in it."""
    seen: dict[str, int] = field(default_factory=dict)
    """Registered total by instance, the least recently seen first."""

    def add(self, records: Sequence[GeneratorRecord]) -> None:
        """Add the tokens since the last observation of each generator, by this trainer or a previous one."""
        for record in records:
            now = record.work.generated_tokens
            if now is None:
                if record.work.prefill_tokens:
                    self.total = None
                continue
            before = self.seen.pop(record.instance_id, 0)
            # A restored Redis may have an older record.
            self.seen[record.instance_id] = max(now, before)
            if self.total is not None:
                self.total += max(0, now - before)
        for instance_id in list(self.seen)[:-MAX_REMEMBERED]:
            del self.seen[instance_id]

    def goodput(self, trained_tokens: int) -> float | None:
        """Return trained tokens per sampled token, 0..1; None if it is unknown.

        A total below the trained tokens is incomplete: it lacks generators that were never observed.
        """
        if not self.total or trained_tokens > self.total:
            return None
        return trained_tokens / self.total

    def to_json(self) -> dict[str, Any]:
        """Return a copy for the trainer state. ``seen`` is a list of pairs, because the state sorts object keys."""
        return {"total": self.total, "seen": [list(pair) for pair in self.seen.items()]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any] | None, *, trained_tokens: int) -> Self:
        """Restore from ``to_json``; None is the state of an older release that had trained ``trained_tokens``."""
        if data is None:
            return cls(total=None if trained_tokens else 0)
        return cls(total=data["total"], seen=dict(data["seen"]))
