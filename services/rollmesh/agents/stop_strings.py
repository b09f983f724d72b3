"""Stop strings: where a text has to end, and how much of it may still become one."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Where the stop string begins that is complete first in ``text`` from ``start`` on; None without one.

    Complete first, not begun first: so the end does not depend on how the text was cut into tokens. Of two that are
    complete at the same place the longer one counts.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Characters at the end of ``text`` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
