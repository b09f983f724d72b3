"""Structured logs: one event per line, with the run and the service on every line.

A line about a trajectory carries ``trajectory``, one about a train step ``train_step``; while traces are recorded such
a line has the ``trace_id`` that leads to its spans. ``policy_version`` is the version that the line is about, else the
one that the process serves, trains or has seen last.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast

import structlog

from rollmesh.config.services import TelemetryConfig
from rollmesh.runtime.tracecontext import TraceContext, is_sampled, traceparent_of, traceparent_of_step

Logger = structlog.stdlib.BoundLogger
Event = MutableMapping[str, Any]


def configure_logging(config: TelemetryConfig, *, service: str, run: str, stream: TextIO | None = None) -> None:
    """Set up structlog for this process; call once, first thing in a service's ``main``.

    Lines go to standard error (or ``stream``), where the launcher (or Kubernetes) picks them up. A line that cannot be
    written is lost: a full disk under the log must not end the service.
    """
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    json = config.log_format == "json"
    renderer: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _Names(service, run),
            _PolicyVersion(),
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
    """A logger whose lines carry ``component=name``; events are snake_case, facts are key=value."""
    logger: Logger = structlog.get_logger(component=name)
    return logger


def note_policy_version(version: int) -> None:
    """Put this policy version on every further line of the process that names no other.

    It is kept in structlog's configuration, so a process that configures its logs anew starts without one.
    """
    for processor in structlog.get_config()["processors"]:
        if isinstance(processor, _PolicyVersion):
            processor.noted = version


@contextmanager
def lines_about(trajectory_id: str) -> Iterator[None]:
    """Put the trajectory on every line that the running task logs meanwhile."""
    with structlog.contextvars.bound_contextvars(trajectory=trajectory_id):
        yield


class _Output:
    """A text stream whose trouble is nobody's."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


class _Names:
    """Adds service and run. Context variables would not do: threads of libraries start with none."""

    def __init__(self, service: str, run: str) -> None:
        self._names = {"service": service, "run": run}

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        for name, value in self._names.items():
            event.setdefault(name, value)
        return event


class _PolicyVersion:
    """Adds the noted version to lines that name none."""

    noted: int | None = None

    def __call__(self, _logger: Any, _method: str, event: Event) -> Event:
        if self.noted is not None:
            event.setdefault("policy_version", self.noted)
        return event


class _TraceIds:
    """Adds the trace of what a line is about; it follows from the name alone, so no line has to carry it along."""

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
