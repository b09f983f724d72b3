"""Work of the engines: sampled tokens of the whole run, and re-prefill and idle slot time between two train steps.

Every generator registers the totals of its process with each heartbeat, and immediately after it loads a policy. The
trainer reads them between steps and during steps, so only the last seconds of a crashed generator are lost.

Goodput is the share of the sampled tokens that was trained on. Both totals, of trained and of sampled tokens, are part
of the trainer's state. They are saved and restored with the weights, so an empty Redis does not reduce them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rollmesh.types import GeneratorRecord, GeneratorWork

_NAMES = ("prefill_tokens", "reprefill_tokens", "running_slot_seconds", "slot_seconds")
_MOST_REMEMBERED = 10_000
"""Maximum number of generators whose totals are stored: all current ones, and many that may return."""


@dataclass(slots=True, kw_only=True)
class GeneratedTokens:
    """Tokens that the generators of a run have sampled, from the total that each generator registers."""

    total: int = 0
    """Total since the start of the run."""
    seen: dict[str, int] = field(default_factory=dict)
    """Registered total by instance, the least recently seen first."""

    def add(self, records: Sequence[GeneratorRecord]) -> None:
        """Add the tokens since the last observation of each generator, by this trainer or a previous one."""
        for record in records:
            now = record.work.generated_tokens
            before = self.seen.pop(record.instance_id, 0)
            # A restored Redis may have an older record.
            self.seen[record.instance_id] = max(now, before)
            self.total += max(0, now - before)
        for instance_id in list(self.seen)[:-_MOST_REMEMBERED]:
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
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Restore from ``to_json``."""
        return cls(total=data["total"], seen=dict(data["seen"]))


class EngineWork:
    """Differences of the registered totals, over generators that start and stop."""

    def __init__(self, generated: GeneratedTokens) -> None:
        """Initialize the totals; ``generated`` receives every observation."""
        self._generated = generated
        self._seen: dict[str, GeneratorWork] = {}
        self._done = dict.fromkeys(_NAMES, 0.0)

    def begin(self, records: Sequence[GeneratorRecord]) -> None:
        """Assign all work so far to no step of this trainer. Its tokens still count for the run."""
        self.observe(records)
        self._taken()

    def since_last(self, records: Sequence[GeneratorRecord]) -> dict[str, Any]:
        """Return the work since the last step, and its shares (None without work): ``mesh.engines`` of a report."""
        self.observe(records)
        work = self._taken()
        return work | {
            "reprefill_share": _share(work["reprefill_tokens"], work["prefill_tokens"]),
            "bubble_ratio": _share(work["slot_seconds"] - work["running_slot_seconds"], work["slot_seconds"]),
        }

    def observe(self, records: Sequence[GeneratorRecord]) -> None:
        """Add the work of the generators to the current step."""
        self._generated.add(records)
        for record in records:
            before = self._seen.pop(record.instance_id, GeneratorWork())
            for name in _NAMES:
                self._done[name] += getattr(record.work, name) - getattr(before, name)
            self._seen[record.instance_id] = record.work
        # A generator may be missing for a while (Redis unreachable). Its earlier work must not count twice.
        for instance_id in list(self._seen)[:-_MOST_REMEMBERED]:
            del self._seen[instance_id]

    def _taken(self) -> dict[str, float]:
        done, self._done = self._done, dict.fromkeys(_NAMES, 0.0)
        return {name: round(value, 3) for name, value in done.items()}


def _share(part: float, whole: float) -> float | None:
    return max(0.0, part / whole) if whole > 0 else None
