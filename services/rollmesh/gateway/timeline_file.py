"""Records of timeline.jsonl, which the launcher writes about once per second, as points of the curves over time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.gateway.curves import Curves
from rollmesh.gateway.rate_window import RateWindow

_FIELDS = (("in_flight", "leased"), ("ready_groups", "ready_groups"), ("memory_ratio", "memory_ratio"))


class TimelineFile:
    """Reader of the records, in their order."""

    def __init__(self) -> None:
        self._rates = RateWindow()
        self.begin_time: float | None = None
        """Time of the first record of the run; None before it."""

    def add(self, record: Mapping[str, Any], curves: Curves, before: float | None = None) -> None:
        """Add a record to the curves; with ``before`` only if it is older (a live gateway polls the rest itself)."""
        view = record.get("view")
        seconds, saved = record.get("t"), record.get("saved_token_total")
        if not isinstance(view, dict) or not isinstance(seconds, float) or not isinstance(saved, int):
            return
        self.begin_time = seconds if self.begin_time is None else min(seconds, self.begin_time)
        if before is not None and seconds >= before:
            return
        rates = self._rates.update(seconds, {"saved_tokens_total": saved})
        values = {"tokens_per_second": rates.saved_tokens_per_second}
        for curve, field in _FIELDS:
            if isinstance(view.get(field), int | float):
                values[curve] = float(view[field])
        curves.add_poll(seconds, values)
