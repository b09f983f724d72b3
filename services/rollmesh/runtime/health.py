"""Liveness and readiness of one process.

Live: every registered loop has beaten within its deadline, so a silently dead task takes the process out.
Ready: the service said so.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(slots=True)
class Health:
    """Shared by the loops of a process (writers) and its admin server (reader)."""

    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    _ready: bool = False
    _reason: str = "starting"
    _deadlines: dict[str, float] = field(default_factory=dict)
    _beats: dict[str, float] = field(default_factory=dict)

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Say whether the service takes work, and why not."""
        self._ready = ready
        self._reason = reason

    def watch(self, loop: str, deadline_seconds: float) -> None:
        """Register a loop that must beat at least every ``deadline_seconds``."""
        self._deadlines[loop] = deadline_seconds
        self._beats[loop] = self.clock()

    def unwatch(self, loop: str) -> None:
        """Forget a loop that ended on purpose."""
        self._deadlines.pop(loop, None)
        self._beats.pop(loop, None)

    def beat(self, loop: str) -> None:
        """Report progress of a registered loop."""
        self._beats[loop] = self.clock()

    def stalled(self) -> dict[str, float]:
        """Loops past their deadline, with the seconds since their last beat."""
        now = self.clock()
        return {
            name: now - self._beats[name] for name, limit in self._deadlines.items() if now - self._beats[name] > limit
        }

    def ready(self) -> tuple[bool, str]:
        """Whether the service takes work, and why not."""
        return self._ready, self._reason
