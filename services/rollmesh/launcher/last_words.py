"""Why a service ended, from what it wrote to its log since it was last started."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.lifecycle import FAILURE_EVENT

_TAIL_BYTES = 64 << 10
_TAIL_LINES = 15
_CONSOLE_FAILURE = re.compile(rf"\b{FAILURE_EVENT}\b.* error=(\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What a process left in its log."""

    error: str
    """Class of the error that it named; empty when it named none."""
    text: str
    """The error with the log's path; without one, the last lines of the log as they are."""


def last_words(log_file: Path, since: int = 0) -> LastWords:
    """Read the end of a log, from byte ``since`` on: what earlier processes wrote there is not this one's reason."""
    try:
        lines = _tail(log_file, since)
    except OSError as error:
        return LastWords(error="", text=f"its log cannot be read: {error}")
    # Not only the last line: torchrun writes its own summary after the rank that failed.
    for line in reversed(lines):
        failure = _failure(line)
        if failure is not None:
            name, message = failure
            return LastWords(error=name, text=f"{name}: {message}\n(log: {log_file})")
    readable = [part for line in lines[-_TAIL_LINES:] for part in _readable(line)]
    text = "\n".join([f"the end of {log_file}:", *(f"  {line}" for line in readable[-_TAIL_LINES:])])
    return LastWords(error="", text=text)


def _tail(file: Path, since: int) -> list[str]:
    with file.open("rb") as handle:
        handle.seek(max(since, file.stat().st_size - _TAIL_BYTES))
        text = handle.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _readable(line: str) -> list[str]:
    """A line as it is; a traceback that is in one, as Python would have written it."""
    try:
        event = json.loads(line)
    except ValueError:
        return [line]
    trace = event.get("exception") if isinstance(event, dict) else None
    return [str(event.get("event")), *trace.splitlines()] if isinstance(trace, str) else [line]


def _failure(line: str) -> tuple[str, str] | None:
    """(error, message) of the log line that ends a service, in either log format; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        console = _CONSOLE_FAILURE.search(line)
        return (console[1], line.strip()) if console is not None else None
    if not isinstance(event, dict) or event.get("event") != FAILURE_EVENT:
        return None
    return str(event.get("error")), str(event.get("message"))
