"""A limit on equal log lines: callers decide how many requests cause one."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

LINE_SECONDS = 1.0
_MOST_KEYS = 256


class LineLimit:
    """Lets one line of a kind through in ``LINE_SECONDS`` and counts the others."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """Time of the newest line and suppressed lines since then."""

    def suppressed(self, key: Hashable) -> int | None:
        """Return how many lines of this kind were suppressed before this one; None to suppress this one, too."""
        now = self._clock()
        written, count = self._lines.get(key, (-LINE_SECONDS, 0))
        if now - written < LINE_SECONDS:
            self._lines[key] = (written, count + 1)
            return None
        if len(self._lines) >= _MOST_KEYS:
            self._lines.clear()
        self._lines[key] = (now, 0)
        return count
