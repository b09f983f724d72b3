"""Structured logs: one event per line, with the run and the service on every line."""

from __future__ import annotations

import logging
import sys
from typing import Any, TextIO

import structlog

from rollmesh.config.services import TelemetryConfig

Logger = structlog.stdlib.BoundLogger


def configure_logging(config: TelemetryConfig, *, service: str, run: str, stream: TextIO | None = None) -> None:
    """Set up structlog for this process; call once, first thing in a service's ``main``.

    Lines go to standard error (or ``stream``), where the launcher (or Kubernetes) picks them up.
    """
    level = logging.getLevelNamesMapping()[config.log_level.upper()]
    json = config.log_format == "json"
    renderer: Any = structlog.processors.JSONRenderer() if json else structlog.dev.ConsoleRenderer(colors=False)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(file=stream or sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(service=service, run=run)


def get_logger(name: str) -> Logger:
    """A logger whose lines carry ``component=name``; events are snake_case, facts are key=value."""
    logger: Logger = structlog.get_logger(component=name)
    return logger
