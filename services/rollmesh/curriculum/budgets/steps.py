"""Budget in stages."""

from __future__ import annotations

from collections.abc import Sequence


def steps(train_step: int, *, stages: Sequence[Sequence[int]]) -> int:
    """Return the budget of the last of the ``(train step, budget)`` stages that has begun. Source: code of TTI."""
    return max((step, budget) for step, budget in stages if step <= train_step)[1]
