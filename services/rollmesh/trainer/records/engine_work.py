"""What the engines did between two train steps: the share of re-prefill, and the slots that stood idle.

Every generator registers the totals of its process with each heartbeat, and at once when it has loaded a policy. The
trainer looks at them between steps and during them, so that one which dies meanwhile is missed for its last seconds
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.trainer.records.goodput import MOST_REMEMBERED, GeneratedTokens
from rollmesh.types import GeneratorRecord, GeneratorWork

_NAMES = ("prefill_tokens", "reprefill_tokens", "running_slot_seconds", "slot_seconds")


class EngineWork:
    """Differences of the registered totals, over generators that come and go."""

    def __init__(self, generated: GeneratedTokens) -> None:
        """``generated`` is told of every look."""
        self._generated = generated
        self._seen: dict[str, GeneratorWork] = {}
        self._done = dict.fromkeys(_NAMES, 0.0)

    def begin(self, records: Sequence[GeneratorRecord]) -> None:
        """What was done until now belongs to no step of this trainer (but its tokens to the run)."""
        self.see(records)
        self._taken()

    def since_last(self, records: Sequence[GeneratorRecord]) -> dict[str, Any]:
        """Work since the last step, and its shares (None without work): ``mesh.engines`` of a step report."""
        self.see(records)
        work = self._taken()
        return work | {
            "reprefill_share": _share(work["reprefill_tokens"], work["prefill_tokens"]),
            "bubble_ratio": _share(work["slot_seconds"] - work["running_slot_seconds"], work["slot_seconds"]),
        }

    def see(self, records: Sequence[GeneratorRecord]) -> None:
        """Note what was done, for the step under way."""
        self._generated.take(records)
        for record in records:
            before = self._seen.pop(record.instance_id, GeneratorWork())
            for name in _NAMES:
                self._done[name] += getattr(record.work, name) - getattr(before, name)
            self._seen[record.instance_id] = record.work
        # A generator may be missing for a while (Redis was away) and must not be counted again from the start.
        for instance_id in list(self._seen)[:-MOST_REMEMBERED]:
            del self._seen[instance_id]

    def _taken(self) -> dict[str, float]:
        done, self._done = self._done, dict.fromkeys(_NAMES, 0.0)
        return {name: round(value, 3) for name, value in done.items()}


def _share(part: float, whole: float) -> float | None:
    return max(0.0, part / whole) if whole > 0 else None
