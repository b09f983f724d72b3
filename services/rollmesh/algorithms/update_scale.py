"""Factor on the learning rate of an update, from the effective sample size of its trajectories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

UpdateScale = Callable[[float], float]
"""Effective sample size per trajectory, in (0, 1] -> factor on the learning rate."""


def ess_scale(share: float, *, base: float, rule: Literal["sqrt", "linear"]) -> float:
    """Return ``min(1, share / base)`` to the power of 1/2 (sqrt) or 1 (linear). Source: VCPO (arXiv 2602.17616).

    >>> ess_scale(0.25, base=1.0, rule="sqrt")
    0.5
    """
    factor = min(1.0, share / base)
    return float(factor**0.5) if rule == "sqrt" else factor
