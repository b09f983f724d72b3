"""Records of timeline.jsonl, which the launcher writes about once per second, as points of the curves over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.rate_window import RateWindow

LEAST_PAUSE_SECONDS = 15.0
"""Shortest time without a record that counts as a pause between two sessions of the run."""
_FIELDS = (("in_flight", "leased"), ("ready_groups", "ready_groups"), ("memory_ratio", "memory_ratio"))


class TimelineFile:
    """Reader of the records, in their order."""

    def __init__(self) -> None:
        self._rates = RateWindow()
        self.begin_time: float | None = None
        """Time of the first record of the run, later by the pauses between its sessions; None before it."""
        self._newest = 0.0

    def add(self, record: Mapping[str, Any], curves: Curves, before: float | None = None) -> None:
        """Add a record to the curves; with ``before`` only if it is older (a live gateway polls the rest itself)."""
        view = record.get("view")
        seconds, saved = record.get("t"), record.get("saved_token_total")
        if not isinstance(view, dict) or not isinstance(seconds, float) or not isinstance(saved, int):
            return
        if self.begin_time is None:
            self.begin_time = seconds
        elif (silent := seconds - self._newest) > LEAST_PAUSE_SECONDS:
            self.begin_time += silent
        self._newest = seconds
        if before is not None and seconds >= before:
            return
        rates = self._rates.update(seconds, {"saved_tokens_total": saved})
        values = {"tokens_per_second": rates.saved_tokens_per_second}
        for curve, field in _FIELDS:
            if isinstance(view.get(field), int | float):
                values[curve] = float(view[field])
        curves.add_poll(seconds, values)
