"""Liveness and readiness of one process.

Live: every registered loop has called ``beat`` within its deadline or is busy, so a dead task fails the liveness probe.
Ready: the service has called ``set_ready(True)``, and no wait blocks it.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_MOST_CHARACTERS = 500
_MOST_SHOWN = 4


class Waits:
    """Waits of this process by operation; safe to use from any thread."""

    def __init__(self) -> None:
        self._reasons: dict[str, tuple[float, str]] = {}
        """Time from which a reason shows, and the reason, by operation."""
        self._blocking: set[str] = set()

    def begin(self, operation: str, error: str, *, blocks: bool = False, after_seconds: float = 0.0) -> None:
        """Show that ``operation`` waits, and its last error, ``after_seconds`` until ``end``.

        While one ``blocks``, the process is not ready.
        """
        reason = " ".join(error.split())[:_MOST_CHARACTERS]
        self._reasons[operation] = (time.monotonic() + after_seconds, reason)
        if blocks:
            self._blocking.add(operation)

    def end(self, operation: str) -> None:
        """Show ``operation`` no more."""
        self._reasons.pop(operation, None)
        self._blocking.discard(operation)

    @property
    def blocking(self) -> bool:
        """True while a wait keeps the process from being ready."""
        return bool(self._blocking)

    def text(self) -> str:
        """Return all waits on one line; empty without one."""
        now = time.monotonic()
        return "; ".join(dict.fromkeys(text for begin, text in list(self._reasons.values()) if begin <= now))


def waits_text(waits: Mapping[str, str]) -> str:
    """Return the waits of several services on one line, equal ones once."""
    services: defaultdict[str, list[str]] = defaultdict(list)
    for name, reason in waits.items():
        services[reason].append(name)
    shown = [
        f"{', '.join(names[:_MOST_SHOWN])}{f' and {len(names) - _MOST_SHOWN} more' if names[_MOST_SHOWN:] else ''}: "
        f"{reason}"
        for reason, names in services.items()
    ]
    return "; ".join(shown[:_MOST_SHOWN])


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
