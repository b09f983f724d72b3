"""Rate limit for equal log lines, whose number depends on the requests of clients."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

LINE_SECONDS = 1.0
_MOST_KEYS = 256


class LineLimit:
    """Rate limit of one line per key and ``LINE_SECONDS``, with a count of the suppressed lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """Time of the newest line and number of suppressed lines since then, by key."""

    def suppressed(self, key: Hashable) -> int | None:
        """Return the number of lines with this key suppressed before this line; None to suppress this line too."""
        now = self._clock()
        written, count = self._lines.get(key, (-LINE_SECONDS, 0))
        if now - written < LINE_SECONDS:
            self._lines[key] = (written, count + 1)
            return None
        if len(self._lines) >= _MOST_KEYS:
            self._lines.clear()
        self._lines[key] = (now, 0)
        return count
