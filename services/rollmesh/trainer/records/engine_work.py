"""Work of the engines between two train steps: the share of re-prefill, and the share of idle slot time.

Every generator registers the totals of its process with each heartbeat, and immediately after it loads a policy. The
trainer reads them between steps and during steps, so only the last seconds of a crashed generator are lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollmesh.trainer.records.goodput import MAX_REMEMBERED, GeneratedTokens
from rollmesh.types import GeneratorRecord, GeneratorWork

_NAMES = ("prefill_tokens", "reprefill_tokens", "running_slot_seconds", "slot_seconds")


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
        for instance_id in list(self._seen)[:-MAX_REMEMBERED]:
            del self._seen[instance_id]

    def _taken(self) -> dict[str, float]:
        done, self._done = self._done, dict.fromkeys(_NAMES, 0.0)
        return {name: round(value, 3) for name, value in done.items()}


def _share(part: float, whole: float) -> float | None:
    return max(0.0, part / whole) if whole > 0 else None
