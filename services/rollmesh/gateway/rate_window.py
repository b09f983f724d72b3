"""Growth rates of lifetime counters."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from rollmesh.gateway.models.live import Rates

_RATE_SECONDS = 10.0
_RATES = ("saved_tokens_total", "finished_total", "consumed_total")


class RateWindow:
    """Growth rates of lifetime counters over the last seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, tuple[int, ...]]] = deque()

    def update(self, now: float, totals: Mapping[str, int]) -> Rates:
        """Add the newest totals and return the rates."""
        values = tuple(totals.get(name, 0) for name in _RATES)
        if self._points and values[0] < self._points[-1][1][0]:
            self._points.clear()  # Redis was restored to an earlier state
        self._points.append((now, values))
        while len(self._points) > 2 and now - self._points[0][0] > _RATE_SECONDS:
            self._points.popleft()
        (before, first), span = self._points[0], now - self._points[0][0]
        rates = [(last - start) / span if now > before else 0.0 for start, last in zip(first, values, strict=True)]
        return Rates(saved_tokens_per_second=rates[0], finished_per_second=rates[1], trained_groups_per_second=rates[2])
