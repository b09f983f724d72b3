"""Services as tasks of the launcher's process, so that a debugger stops in any of them (``rollmesh up --inline``).

All services share one event loop. What blocks it, such as a breakpoint in an environment, stops the whole mesh; a
breakpoint in a loss or a verifier stops its thread. Redis and the sandboxes of untrusted code stay separate processes.
"""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Mapping
from contextvars import ContextVar
from pathlib import Path
from typing import TextIO

import structlog

from rollmesh.config import RunConfig, load_run_config
from rollmesh.errors import RollmeshError
from rollmesh.launcher.supervisor import ServiceProcess, ServiceSpec, StartService
from rollmesh.runtime.addresses import instance_name
from rollmesh.runtime.lifecycle import Shutdown, log_failure
from rollmesh.runtime.logging import log_crash

Serve = Callable[[RunConfig, int, Shutdown], Awaitable[None]]

_WEEK_SECONDS = 604_800
INLINE_OVERRIDES = (
    *(
        f"{field}={_WEEK_SECONDS}"
        for field in (
            "launcher.start_timeout_seconds",
            "rollout.agent.idle_timeout_seconds",
            "rollout.chunk_timeout_seconds",
            "rollout.environment_timeout_seconds",
            "schedule.straggler_timeout_seconds",
        )
    ),
    "launcher.restart_limit=0",
)
"""Settings of an inline run: no time limit that a breakpoint could exceed, and no restart of a failed service."""

_log_file: ContextVar[Path | None] = ContextVar("service_log_file", default=None)


class ServiceLogs:
    """A text stream that appends the lines of each service to its log, and other lines to the launcher's."""

    def __init__(self, launcher: TextIO) -> None:
        self._launcher = launcher

    def write(self, text: str) -> None:
        """Write to the log of the current task's service."""
        file = _log_file.get()
        if file is None:
            self._launcher.write(text)
            return
        with file.open("a", encoding="utf-8") as log:
            log.write(text)

    def flush(self) -> None:
        """Flush the launcher's log; the others are closed after each line."""
        self._launcher.flush()


def inline_start(config_file: Path, serve: Mapping[str, Serve]) -> StartService:
    """Return a starter of services as tasks of this process, with the settings that their processes would read."""

    async def start(spec: ServiceSpec) -> ServiceProcess:
        return _InlineService(spec, config_file, serve[spec.service])

    return start


class _InlineService:
    """One service; SIGTERM requests its shutdown, SIGKILL cancels its task."""

    def __init__(self, spec: ServiceSpec, config_file: Path, serve: Serve) -> None:
        self.pid = os.getpid()
        self._shutdown = asyncio.Event()
        self._task = asyncio.create_task(_exit_status(spec, config_file, serve, self._shutdown), name=spec.name)

    @property
    def returncode(self) -> int | None:
        if not self._task.done():
            return None
        return 1 if self._task.cancelled() else self._task.result()

    async def wait(self) -> int:
        await asyncio.wait({self._task})
        return self.returncode or 0

    def send_signal(self, number: signal.Signals) -> None:
        self._shutdown.set()
        if number is signal.SIGKILL:
            self._task.cancel()


async def _exit_status(spec: ServiceSpec, config_file: Path, serve: Serve, shutdown: Shutdown) -> int:
    """Run a service to its end; returns the exit status that its process would have."""
    _log_file.set(spec.log_file)
    try:
        config = load_run_config(config_file, environ=spec.environment)
        structlog.contextvars.bind_contextvars(service=instance_name(config, spec.service, spec.index))
        await serve(config, spec.index, shutdown)
    except RollmeshError as error:
        return log_failure(error)
    except (Exception, SystemExit) as error:  # sys.exit() of a user's module ends its service only
        log_crash(type(error), error, error.__traceback__)
        return 1
    return 0
