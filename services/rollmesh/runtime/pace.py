"""Pace of the newest train steps, for an estimate of the time to the last one."""

from __future__ import annotations

import itertools
from collections import deque
from statistics import median

_STEPS = 20


class Pace:
    """Times of the newest train steps."""

    def __init__(self) -> None:
        self._ends: deque[tuple[int, float]] = deque(maxlen=_STEPS + 1)

    def add(self, train_step: int, time: float) -> None:
        """Add the end of a step; a repeated step replaces itself and all later ones."""
        self.remove(train_step)
        self._ends.append((train_step, time))

    def remove(self, from_step: int) -> None:
        """Remove a step and all later ones."""
        while self._ends and self._ends[-1][0] >= from_step:
            self._ends.pop()

    def remaining(self, train_step: int, train_steps: int, now: float) -> float | None:
        """Return the seconds to the last step at the median pace; None without two steps, or after the last step.

        The median ignores a pause of the run between two steps.
        """
        if train_step >= train_steps or len(self._ends) < 2:
            return None
        pace = median((b - a) / (n - m) for (m, a), (n, b) in itertools.pairwise(self._ends))
        return max(0.0, (train_steps - train_step) * pace - min(pace, max(0.0, now - self._ends[-1][1])))
