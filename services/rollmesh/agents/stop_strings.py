"""Search for stop strings in text that is still growing."""

from __future__ import annotations

from collections.abc import Sequence


def find_stop(text: str, stops: Sequence[str], start: int = 0) -> int | None:
    """Return the position of the first stop string completed in ``text`` from ``start`` on, or None.

    The stop string that ends first wins, not the one that begins first. The result therefore does not depend on the
    token boundaries. If two stop strings end at the same position, the longer one wins.
    """
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop, start)) >= 0]
    return min(found)[1] if found else None


def held_back(text: str, stops: Sequence[str]) -> int:
    """Return the length of the suffix of ``text`` that may be the beginning of a stop string."""
    longest = 0
    for stop in stops:
        for length in range(min(len(stop) - 1, len(text)), longest, -1):
            if text.endswith(stop[:length]):
                longest = length
                break
    return longest
