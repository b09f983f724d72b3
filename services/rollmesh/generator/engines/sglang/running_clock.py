"""A clock that can be stopped."""

from __future__ import annotations

import time


class RunningClock:
    """Seconds that have passed while it was not stopped."""

    def __init__(self) -> None:
        self._passed = 0.0
        self._since: float | None = time.monotonic()

    @property
    def stopped(self) -> bool:
        """Whether it stands still."""
        return self._since is None

    def seconds(self) -> float:
        """The time on it."""
        return self._passed if self._since is None else self._passed + time.monotonic() - self._since

    def stop(self) -> None:
        """Stand still; nothing happens to a clock that does."""
        self._passed, self._since = self.seconds(), None

    def go_on(self) -> None:
        """Run again; nothing happens to a clock that runs."""
        if self._since is None:
            self._since = time.monotonic()
