"""Reason for the exit of a service, read from its log since its last start."""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass
from pathlib import Path

from rollmesh.runtime.growing_files import tail_lines
from rollmesh.runtime.lifecycle import FAILURE_EVENT

_TAIL_LINES = 15
_CONSOLE_FAILURE = re.compile(rf"\b{FAILURE_EVENT}\b.* error=(\w+)")
_CONSOLE_PASSING = re.compile(r"\bpassing=True\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class ExitReason:
    """Reason for an exit, as logged by the process."""

    error: str
    """Class name of the logged error; empty without one."""
    text: str
    """The error with the path of the log; without an error, the last lines of the log."""
    summary: str
    """The error on one line, or the last line of the log."""
    passing: bool = False
    """True if the cause is outside the process, so that a later start may succeed."""


def exit_reason(log_file: Path, since: int = 0, code: int = 1) -> ExitReason:
    """Read the reason from the end of a log; skip the first ``since`` bytes, which earlier processes wrote.

    A process with a negative exit status was killed by a signal, of which its log knows nothing.
    """
    try:
        lines = tail_lines(log_file, since)
    except OSError as error:
        return ExitReason(error="", text=f"its log cannot be read: {error}", summary="its log cannot be read")
    # Search beyond the last line: torchrun writes its own summary after the line of the failed rank.
    for line in reversed(lines):
        failure = _failure(line)
        if failure is not None:
            name, message, passing = failure
            text = f"{name}: {message}"
            return ExitReason(
                error=name, text=f"{text}\n(log: {log_file})", summary=" ".join(text.split()), passing=passing
            )
    readable = [part for line in lines[-_TAIL_LINES:] for part in _readable(line)]
    killed = ""
    if code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        hint = ": by kill -9, or by the kernel when memory is short (dmesg tells)" if -code == signal.SIGKILL else ""
        killed = f"killed by {name}{hint}"
    end = [f"the end of {log_file}:", *(f"  {line}" for line in readable[-_TAIL_LINES:])]
    last = readable[-1].strip() if readable else "it logged nothing"
    return ExitReason(error="", text="\n".join([killed, *end] if killed else end), summary=killed or last)


def _readable(line: str) -> list[str]:
    """Split a JSON line with a traceback into the lines that Python would print; keep any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        return [line]
    trace = event.get("exception") if isinstance(event, dict) else None
    return [str(event.get("event")), *trace.splitlines()] if isinstance(trace, str) else [line]


def _failure(line: str) -> tuple[str, str, bool] | None:
    """Parse (error, message, passing) from a failure line in either log format; None for any other line."""
    try:
        event = json.loads(line)
    except ValueError:
        console = _CONSOLE_FAILURE.search(line)
        return None if console is None else (console[1], line.strip(), _CONSOLE_PASSING.search(line) is not None)
    if not isinstance(event, dict) or event.get("event") != FAILURE_EVENT:
        return None
    return str(event.get("error")), str(event.get("message")), event.get("passing") is True
