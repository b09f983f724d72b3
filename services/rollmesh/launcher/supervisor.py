"""Supervision of services: restart with back-off, one log file per child, the reason of each exit, orderly shutdown.

A child fails the run when it exits more often than the restart limit within ten minutes of ready time. Startup and the
delay before a restart do not count: on a slow machine a start takes minutes, and a child that fails at every startup
would stay below any limit per wall-clock time.
"""

import asyncio
import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rollmesh.config.load import inherited_environment
from rollmesh.errors import RollmeshError
from rollmesh.runtime.growing_files import tail_lines
from rollmesh.runtime.lifecycle import EXIT_CONFIG, EXIT_UNFINISHED, FAILURE_EVENT
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff

_BACKOFF = Backoff(first_seconds=0.5, longest_seconds=30.0)
_LIMIT_WINDOW_SECONDS = 600.0
_TAIL_LINES = 15
_CONSOLE_FAILURE = re.compile(rf"\b{FAILURE_EVENT}\b.* error=(\w+)")
_CONSOLE_PASSING = re.compile(r"\bpassing=True\b")


class ServiceFailed(RollmeshError, RuntimeError):
    """Error of a service that exceeded the restart limit or reported an error that a restart cannot fix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceSpec:
    """Specification of one service process."""

    service: str
    index: int
    command: Sequence[str]
    environment: Mapping[str, str]
    log_file: Path
    grace_seconds: float = 30.0
    """Seconds between SIGTERM and SIGKILL."""
    one_shot: bool = False
    """True if the process ends by itself: with exit status 0 when its work is complete, or ``EXIT_UNFINISHED``."""
    final_errors: frozenset[str] = frozenset({"ConfigError", "DataError"})
    """Classes of logged errors that a restart cannot fix, whatever the exit status (torchrun sets its own).

    Exit status ``EXIT_CONFIG`` has the same effect: every ``final`` error sets it.
    """
    vital: bool = True
    """True if the run fails with this service; otherwise the run continues without it."""

    @property
    def name(self) -> str:
        """``service-index``."""
        return f"{self.service}-{self.index}"


class ServiceProcess(Protocol):
    """A started service: what the supervisor needs of an ``asyncio.subprocess.Process``."""

    @property
    def pid(self) -> int: ...
    @property
    def returncode(self) -> int | None: ...
    async def wait(self) -> int: ...
    def send_signal(self, number: signal.Signals) -> None: ...


class _ProcessGroup:
    """A service in a process group of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    async def wait(self) -> int:
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


StartService = Callable[[ServiceSpec], Awaitable[ServiceProcess]]


async def start_process(spec: ServiceSpec) -> ServiceProcess:
    """Start a service as a process that appends its output to its log."""
    with spec.log_file.open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**inherited_environment(), **spec.environment},
            start_new_session=True,
        )
    return _ProcessGroup(process)


@dataclass(slots=True)
class _Child:
    spec: ServiceSpec
    process: ServiceProcess | None = None
    task: asyncio.Task[None] | None = None
    stopping: bool = False
    retirement: asyncio.Task[None] | None = None
    """Task that removes the child while the other children continue; None before ``retire``."""
    finished: bool = False
    """True after exit status 0 or ``EXIT_UNFINISHED`` of a one-shot child."""
    log_start: int = 0
    """Bytes of the log at the start of the process."""
    service_seconds: float = 0.0
    """Ready time over all processes of the child."""
    restarts: list[float] = field(default_factory=list)
    """``service_seconds`` at each restart within the limit's window."""


class Supervisor:
    """Supervisor of child processes; ``failed`` resolves to the reason when a vital child cannot be restarted."""

    def __init__(
        self,
        restart_limit: int,
        note: Callable[[str], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
        start: StartService = start_process,
    ) -> None:
        self._start = start
        self._limit = restart_limit
        self._note = note
        self._clock = clock
        self._children: dict[str, _Child] = {}
        self._log = get_logger("supervisor")
        self.failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.given_up: dict[str, str] = {}
        """Reasons, by name, of the failed children that are not vital."""

    def start(self, spec: ServiceSpec) -> None:
        """Start a child and keep it running until ``stop``."""
        child = _Child(spec)
        self._children[spec.name] = child
        self._supervise(child)

    def retire(self, name: str) -> asyncio.Task[None]:
        """Stop a child as ``stop`` does and remove it; the returned task ends after its exit."""
        child = self._children[name]
        if child.retirement is None:
            child.stopping = True
            child.retirement = asyncio.create_task(self._retire(child), name=f"retire-{name}")
        return child.retirement

    def indexes(self, service: str) -> tuple[list[int], list[int]]:
        """Return the indexes of the service's children, and the indexes of those that are being retired."""
        children = [c for c in self._children.values() if c.spec.service == service]
        return [c.spec.index for c in children], [c.spec.index for c in children if c.retirement is not None]

    def finished(self, name: str) -> bool:
        """Tell whether a one-shot child has ended without an error."""
        return self._children[name].finished

    def start_again(self, name: str) -> None:
        """Restart a one-shot child that ended without an error before its work was complete, as after a SIGTERM."""
        child = self._children[name]
        child.finished = False
        self._supervise(child, self._delay_after(child, 0, self._clock()))

    def count_service(self, names: Collection[str], seconds: float) -> None:
        """Add ``seconds`` of ready time to these children."""
        for name in names:
            if self.pid(name) is not None:
                self._children[name].service_seconds += seconds

    def restart_counts(self) -> dict[str, int]:
        """Return the number of recent restarts by child name."""
        return {name: len(child.restarts) for name, child in self._children.items()}

    def pid(self, name: str) -> int | None:
        """Return the process id of a running child; None for any other."""
        process = self._children[name].process if name in self._children else None
        return process.pid if process is not None and process.returncode is None else None

    async def stop(self, services: Sequence[str]) -> None:
        """Stop the children of these services in the given order: SIGTERM, then SIGKILL after the grace period."""
        for service in services:
            children = [c for c in self._children.values() if c.spec.service == service]
            leaving = [c.retirement for c in children if c.retirement is not None]
            await asyncio.gather(*leaving, *(self._stop(child) for child in children if not child.stopping))

    async def kill_all(self) -> None:
        """Kill every child that still runs with SIGKILL."""
        for child in list(self._children.values()):
            child.stopping = True
            if child.task is not None:
                child.task.cancel()
            if child.process is not None and child.process.returncode is None:
                child.process.send_signal(signal.SIGKILL)
                await child.process.wait()
            if child.retirement is not None:
                await child.retirement

    def _supervise(self, child: _Child, delay: float | None = 0.0) -> None:
        if delay is not None:
            child.task = asyncio.create_task(self._keep_up(child, delay), name=f"supervise-{child.spec.name}")

    async def _keep_up(self, child: _Child, delay: float) -> None:
        while True:
            await asyncio.sleep(delay)
            started = self._clock()
            try:
                child.spec.log_file.parent.mkdir(parents=True, exist_ok=True)
                child.log_start = child.spec.log_file.stat().st_size if child.spec.log_file.exists() else 0
                child.process = await self._start(child.spec)
                code = await child.process.wait()
            except OSError as error:
                self._fail(child.spec, f"{child.spec.name} cannot be started: {error}")
                return
            if child.stopping:
                return
            if child.spec.one_shot and code in (0, EXIT_UNFINISHED):
                child.finished = True
                return
            reason = exit_reason(child.spec.log_file, child.log_start, code)
            if code == EXIT_CONFIG or reason.error in child.spec.final_errors:
                self._fail(child.spec, f"{child.spec.name} cannot continue: {reason.text}")
                return
            if reason.passing:
                # A dependency such as Redis was unreachable: restarts during an outage must not reach the limit.
                child.service_seconds += delay + self._clock() - started
            after = self._delay_after(child, code, started, reason.text)
            if after is None:
                return
            delay = after
            restart = f"restart {len(child.restarts)} of {self._limit} in {delay:.1f} s"
            self._note(f"{child.spec.name} ended with status {code}, {restart}: {reason.summary}")

    def _delay_after(self, child: _Child, code: int, started: float, reason: str = "") -> float | None:
        """Return the seconds until the restart of a child; None after too many exits, which fail the run."""
        now = self._clock()
        served = child.service_seconds
        child.restarts = [t for t in child.restarts if served - t < _LIMIT_WINDOW_SECONDS] + [served]
        if len(child.restarts) > self._limit:
            times = f"{len(child.restarts)} times within ten minutes of ready time"
            ended = f"{child.spec.name} ended with status {code}, {times}{f': {reason}' if reason else ''}"
            self._fail(child.spec, ended)
            return None
        recent = len(child.restarts) if now - started < _BACKOFF.longest_seconds else 1
        delay = _BACKOFF.seconds(recent)
        self._log.warning("service_restarts", name=child.spec.name, exit_status=code, delay_seconds=delay)
        return delay

    async def _retire(self, child: _Child) -> None:
        await self._stop(child)
        if child.task is not None:
            # This includes a child in startup: its cancelled start must end before the name is reused.
            await asyncio.wait({child.task})
        del self._children[child.spec.name]

    async def _stop(self, child: _Child) -> None:
        child.stopping = True
        process = child.process
        if process is None or process.returncode is not None:
            if child.task is not None:
                child.task.cancel()
            return
        process.send_signal(signal.SIGTERM)
        try:
            # Not wait_for: on Python 3.11 it may swallow the cancellation by a second Ctrl-C.
            async with asyncio.timeout(child.spec.grace_seconds):
                await process.wait()
        except TimeoutError:
            self._log.warning("service_killed_after_grace", name=child.spec.name, grace=child.spec.grace_seconds)
            process.send_signal(signal.SIGKILL)
            await process.wait()

    def _fail(self, spec: ServiceSpec, reason: str) -> None:
        if not spec.vital:
            self._log.warning("service_given_up", name=spec.name, reason=reason)
            self.given_up[spec.name] = reason
            return
        if not self.failed.done():
            self.failed.set_result(reason)


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
