"""Liveness and readiness of one process.

Live: every registered loop has called ``beat`` within its deadline or is busy, so a dead task fails the liveness probe.
Ready: the service has called ``set_ready(True)``, and no wait blocks it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from rollmesh.runtime.waits import Waits


@dataclass(slots=True)
class Health:
    """Health state, written by the loops of a process and read by its admin server."""

    clock: Callable[[], float] = time.monotonic
    """Clock in monotonic seconds."""
    waits: Waits = field(default_factory=Waits)
    """What the process waits for, with the last error of each; a ready service may wait too."""
    _ready: bool = False
    _reason: str = "starting"
    _deadlines: dict[str, float] = field(default_factory=dict)
    _beats: dict[str, float] = field(default_factory=dict)
    _busy: dict[str, Callable[[], bool]] = field(default_factory=dict)

    def set_ready(self, ready: bool, reason: str = "") -> None:
        """Set the readiness of the service, and the reason when it is not ready."""
        self._ready = ready
        self._reason = reason

    def watch(self, loop: str, deadline_seconds: float, busy: Callable[[], bool] = lambda: False) -> None:
        """Register a loop that must beat at least every ``deadline_seconds``, except while ``busy`` returns True."""
        self._busy[loop] = busy
        self._deadlines[loop] = deadline_seconds
        self._beats[loop] = self.clock()

    def unwatch(self, loop: str) -> None:
        """Remove a loop that ended on purpose."""
        self._deadlines.pop(loop, None)
        self._beats.pop(loop, None)
        self._busy.pop(loop, None)

    def beat(self, loop: str) -> None:
        """Report progress of a registered loop."""
        self._beats[loop] = self.clock()

    def stalled(self) -> dict[str, float]:
        """Return the loops past their deadline, with the seconds since their last beat."""
        now = self.clock()
        self._beats |= {name: now for name, busy in self._busy.items() if busy()}
        return {
            name: now - self._beats[name] for name, limit in self._deadlines.items() if now - self._beats[name] > limit
        }

    def ready(self) -> tuple[bool, str]:
        """Return the readiness of the service, and the reason when it is not ready."""
        if self._ready and self.waits.blocking:
            return False, self.waits.text()
        return self._ready, self._reason
