"""Periodic budgets of SIRI, which compress the answers of a policy and let them expand again."""

from __future__ import annotations

import math


def cosine(train_step: int, *, shortest: int, longest: int, period: int) -> int:
    """Return ``(L_max + L_min) / 2 + (L_max - L_min) / 2 cos(2 pi t / T)``, rounded. Source: arXiv 2509.25176."""
    return _wave(2 * math.pi * (train_step % period) / period, shortest, longest)


def stair_cosine(train_step: int, *, shortest: int, longest: int, period: int) -> int:
    """Return a cosine that rests for a quarter of the period at each of its two ends.

    With ``phi = 2 pi (t mod T) / T``: L_max below pi / 4 and from 7 pi / 4 on, L_min from 3 pi / 4 to 5 pi / 4, between
    them half a cosine over the double phase. Source: arXiv 2509.25176.
    """
    eighth = 8 * (train_step % period) / period
    if eighth < 1 or eighth >= 7:
        return longest
    if 3 <= eighth < 5:
        return shortest
    start = 1 if eighth < 3 else 3
    return _wave(math.pi / 2 * (eighth - start), shortest, longest)


def stair(train_step: int, *, shortest: int, longest: int, period: int, compression: float) -> int:
    """Return L_min for the share ``compression`` of each period, then L_max. Source: arXiv 2509.25176."""
    # 0.07 * 100 is a little above 7 in floating point.
    return shortest if train_step % period < compression * period - 1e-9 else longest


def _wave(phase: float, shortest: int, longest: int) -> int:
    return round((longest + shortest) / 2 + (longest - shortest) / 2 * math.cos(phase))
