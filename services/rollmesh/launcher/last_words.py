"""Why a service ended, from the end of its log file."""

from __future__ import annotations

import json
from pathlib import Path

from rollmesh.runtime.lifecycle import FAILURE_EVENT

_TAIL_BYTES = 64 << 10
_TAIL_LINES = 15


def last_words(log_file: Path) -> str:
    """The error that the service named, with the log's path; else the last lines of the log as they are."""
    try:
        lines = _tail(log_file)
    except OSError as error:
        return f"its log cannot be read: {error}"
    named = _named_error(lines[-1]) if lines else None
    if named is not None:
        return f"{named}\n(log: {log_file})"
    return "\n".join([f"the end of {log_file}:", *(f"  {line}" for line in lines[-_TAIL_LINES:])])


def _tail(file: Path) -> list[str]:
    with file.open("rb") as handle:
        handle.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        text = handle.read().decode(errors="replace")
    return [line for line in text.splitlines() if line.strip()]


def _named_error(line: str) -> str | None:
    """``Error: message`` of a JSON log line that ends a service; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or event.get("event") != FAILURE_EVENT:
        return None
    return f"{event.get('error')}: {event.get('message')}"
