"""Waits of a process: the last error of each outside part that it waits for, such as Redis or a full disk.

A process shows its own waits on ``/readyz``. Those who wait for the process (launcher, page, ``rollmesh status``) read
them there.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping

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
