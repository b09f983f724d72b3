"""Capture of library warnings and uncaught exceptions in the service log.

They become structured lines, so that one line is one event for the log collector.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from rollmesh.runtime.logging import LineLimit, get_logger

CRASH_EVENT = "service_crashed"
"""Last log line of a process that ended with an uncaught exception; ``exception`` has the traceback."""


def capture_foreign_logs() -> None:
    """Route library warnings and uncaught exceptions into the service log; call once, after ``configure_logging``."""
    logging.getLogger().addHandler(_LibraryLogHandler())
    logging.captureWarnings(True)
    sys.excepthook = log_crash
    threading.excepthook = _thread_crashed


class _LibraryLogHandler(logging.Handler):
    """Handler that writes records of the standard library's logging as structured lines, rate-limited by message."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._limit = LineLimit()

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage().strip()
            suppressed = self._limit.suppressed((record.name, message))
            if suppressed is not None:
                counted = {"suppressed": suppressed} if suppressed else {}
                get_logger(record.name).log(
                    record.levelno, "library_message", message=message, exc_info=record.exc_info, **counted
                )
        except Exception:
            self.handleError(record)


def log_crash(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Log an uncaught exception with its traceback; Ctrl-C prints its traceback only."""
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    get_logger("lifecycle").critical(
        CRASH_EVENT, error=kind.__name__, message=str(error), exc_info=(kind, error, trace)
    )


def _thread_crashed(of: threading.ExceptHookArgs) -> None:
    if of.exc_value is None or issubclass(of.exc_type, SystemExit):
        return
    get_logger("lifecycle").error(
        "thread_crashed",
        thread=of.thread.name if of.thread is not None else "",
        error=of.exc_type.__name__,
        message=str(of.exc_value),
        exc_info=(of.exc_type, of.exc_value, of.exc_traceback),
    )
