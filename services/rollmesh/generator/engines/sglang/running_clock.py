"""Clock that can be stopped."""

from __future__ import annotations

import time


class RunningClock:
    """Clock that counts the seconds during which it is not stopped."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = time.monotonic()

    @property
    def stopped(self) -> bool:
        """True while the clock is stopped."""
        return self._since is None

    def seconds(self) -> float:
        """Return the seconds counted so far."""
        return self._passed if self._since is None else self._passed + time.monotonic() - self._since

    def stop(self) -> None:
        """Stop the clock; no effect if it is stopped."""
        self._passed, self._since = self.seconds(), None

    def start(self) -> None:
        """Start the clock again; no effect if it runs."""
        if self._since is None:
            self._since = time.monotonic()
