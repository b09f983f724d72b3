"""What others write to the log of a service: libraries' warnings, tracebacks of what nobody caught.

They become lines of the service's own log, so that one line is one event for whoever collects them.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType

from rollmesh.runtime.line_limit import LineLimit
from rollmesh.runtime.logging import get_logger

CRASH_EVENT = "service_crashed"
"""The last line of a process that ended with an error of ours: ``exception`` has the traceback."""


def capture_foreign_logs() -> None:
    """Put warnings of libraries and uncaught errors of this process into its log; call once, after its set-up."""
    logging.getLogger().addHandler(_Adopting())
    logging.captureWarnings(True)
    sys.excepthook = _crashed
    threading.excepthook = _thread_crashed


class _Adopting(logging.Handler):
    """Records of the standard library's logging, as lines of ours; equal ones share a line a second."""

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


def _crashed(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
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
