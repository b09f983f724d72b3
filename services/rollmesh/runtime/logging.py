"""Structured logs: one event per line, with the run and the service on every line.

A line about a trajectory has the field ``trajectory``, a line about a train step ``train_step``. While traces are
recorded, these lines also have the ``trace_id`` of their spans. ``policy_version`` is the version that the line is
about, else the version that the process serves, trains or has read last.
"""

import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Hashable, Iterator, MutableMapping
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any, TextIO, cast

import structlog

from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.spans import TraceContext, is_sampled, traceparent_of, traceparent_of_step

Logger = structlog.stdlib.BoundLogger
Event = MutableMapping[str, Any]

LINE_SECONDS = 1.0
_MOST_KEYS = 256


def configure_logging(config: TelemetryConfig, *, service: str, run: str, stream: TextIO | None = None) -> None:
    """Configure structlog for this process; call once, at the beginning of a service's ``main``.

    Lines go to standard error (or ``stream``), where the launcher (or Kubernetes) collects them. A line that cannot be
    written is dropped, because a full disk must not stop the service.
    """
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    json = config.log_format == "json"
    renderer: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _Names(service, run),
            *([_TraceIds(run, config.trace_ratio)] if config.otlp_endpoint is not None else []),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Output(stream or sys.stderr))),
        cache_logger_on_first_use=True,
    )


def get_logger(name: str) -> Logger:
    """Return a logger whose lines have ``component=name``; events are snake_case, other fields key=value."""
    logger: Logger = structlog.get_logger(component=name)
    return logger


def note_policy_version(version: int) -> None:
    """Add this policy version to every later line of the process without a ``policy_version``.

    It is stored in structlog's configuration, so a new ``configure_logging`` clears it.
    """
    for processor in structlog.get_config()["processors"]:
        if isinstance(processor, _Names):
            processor.names["policy_version"] = version


@contextmanager
def lines_about(trajectory_id: str) -> Iterator[None]:
    """Add the trajectory to every line that the current task logs in this context."""
    with structlog.contextvars.bound_contextvars(trajectory=trajectory_id):
        yield


class _Output:
    """A text stream that ignores write errors, and lines after it is closed: the launcher's log ends with the run."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()


class _Names:
    """Processor that adds service, run and the noted policy version; threads of libraries have no context variables."""

    def __init__(self, service: str, run: str) -> None:
        self.names: dict[str, Any] = {"service": service, "run": run}

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        for name, value in self.names.items():
            event.setdefault(name, value)
        return event


class _TraceIds:
    """Processor that adds the trace id, which is derived from the trajectory or train step of a line."""

    def __init__(self, run: str, ratio: float) -> None:
        self._run = run
        self._ratio = ratio

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        if "trajectory" in event:
            traceparent = traceparent_of(self._run, str(event["trajectory"]))
        elif "train_step" in event:
            traceparent = traceparent_of_step(self._run, event["train_step"])
        else:
            return event
        place = TraceContext.parse(traceparent)
        if place is not None and is_sampled(place.trace_id, self._ratio):
            event["trace_id"] = f"{place.trace_id:032x}"
        return event


class LineLimit:
    """Rate limit of one line per key and ``seconds``, with a count of the suppressed lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, seconds: float = LINE_SECONDS) -> None:
        self._clock = clock
        self._seconds = seconds
        self._lines: dict[Hashable, tuple[float, int]] = {}
        """Time of the newest line and number of suppressed lines since then, by key."""

    def suppressed(self, key: Hashable) -> int | None:
        """Return the number of lines with this key suppressed before this line; None to suppress this line too."""
        now = self._clock()
        written, count = self._lines.get(key, (-math.inf, 0))
        if now - written < self._seconds:
            self._lines[key] = (written, count + 1)
            return None
        if len(self._lines) >= _MOST_KEYS:
            self._lines.clear()
        self._lines[key] = (now, 0)
        return count


CRASH_EVENT = "service_crashed"
"""Last log line of a process that ended with an uncaught exception; ``exception`` has the traceback."""


def capture_foreign_logs() -> None:
    """Route library warnings and uncaught exceptions into the service log; call once, after ``configure_logging``."""
    logging.getLogger().addHandler(_LibraryLogHandler())
    logging.captureWarnings(True)
    sys.excepthook = log_crash

    def thread_crashed(of: threading.ExceptHookArgs) -> None:
        if of.exc_value is not None and not issubclass(of.exc_type, SystemExit):
            get_logger("lifecycle").error(
                "thread_crashed",
                thread=of.thread.name if of.thread is not None else "",
                error=of.exc_type.__name__,
                message=str(of.exc_value),
                exc_info=(of.exc_type, of.exc_value, of.exc_traceback),
            )

    threading.excepthook = thread_crashed


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
