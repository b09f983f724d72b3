"""Memory, CPU and logs of the processes of a run, from the launcher's process tree and its log files."""

import asyncio
import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import psutil

from rollmesh.config.teachers import teacher_service
from rollmesh.gateway.models.items import LogTail, ProcessList, ProcessView
from rollmesh.runtime.growing_files import tail_lines
from rollmesh.runtime.locks import launcher_process
from rollmesh.runtime.request_guard import NotFound

_LEAST_SECONDS = 2.0
"""Time between two reads of the process tree, so that many clients cost as much as one."""
_MOST_LINE = 4000
"""Characters shown of one line."""
_LAUNCHER, _REDIS = "launcher-0", "redis"


class _Usage(NamedTuple):
    """Resources of one process and its children."""

    pid: int
    memory_bytes: int
    cpu_seconds: float


class RunProcesses:
    """Processes and logs of one run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._usage: Mapping[str, _Usage] = {}
        self._shares: Mapping[str, float] = {}
        self._read_at: float | None = None

    async def list(self) -> ProcessList:
        """Return the running processes and those that have left a log, by name."""
        return await asyncio.to_thread(self._list)

    async def log(self, name: str, lines: int) -> LogTail:
        """Return the last lines of a log; NotFound without one."""
        try:
            found = await asyncio.to_thread(tail_lines, self._folder / "logs" / f"{name}.log")
        except OSError as error:
            raise NotFound(f"no log of {name}", field="name", hint="GET /api/v1/processes lists the logs") from error
        return LogTail(name=name, lines=[line[:_MOST_LINE] for line in found[-lines:]])

    def _list(self) -> ProcessList:
        with self._lock:
            self._read_usage()
            usage, shares = self._usage, self._shares
        logs: dict[str, int] = {}
        for file in (self._folder / "logs").glob("*-*.log"):
            with contextlib.suppress(OSError):
                logs[file.stem] = file.stat().st_size
        processes = []
        for name in sorted({*usage, *logs}, key=_order):
            pid, memory, _ = usage.get(name, (None, None, None))
            share = round(shares[name], 3) if name in shares else None
            view = ProcessView(name=name, pid=pid, memory_bytes=memory, cpu_share=share, log_bytes=logs.get(name))
            processes.append(view)
        return ProcessList(processes=processes)

    def _read_usage(self) -> None:
        now = time.monotonic()
        seconds = None if self._read_at is None else now - self._read_at
        if seconds is not None and seconds < _LEAST_SECONDS:
            return
        launcher = launcher_process(self._folder)
        before, self._usage, self._read_at = self._usage, {} if launcher is None else _usage_of(launcher), now
        # A child that has ended takes its CPU time with it: the sum may be smaller than before.
        self._shares = {
            name: max(0.0, (each.cpu_seconds - before[name].cpu_seconds) / seconds)
            for name, each in self._usage.items()
            if seconds is not None and name in before and before[name].pid == each.pid
        }


def service_of(command: Sequence[str]) -> str | None:
    """Return service and index of a command line of the launcher (``launcher.service_specs``); None for any other."""
    try:
        at = command.index("rollmesh.cli.main") + 1
        service = teacher_service(command[at + 2]) if command[at] == "teacher" else command[at]
        return f"{service}-{command[command.index('--index', at) + 1]}"
    except (ValueError, IndexError):
        return None


def _usage_of(launcher: psutil.Process) -> dict[str, _Usage]:
    """Return the resources of the launcher's services with their children, and of the rest of its process tree."""
    found: dict[str, _Usage] = {}
    names = {launcher.pid: _LAUNCHER}
    with contextlib.suppress(psutil.Error):
        for process in (launcher, *launcher.children(recursive=True)):  # parents first
            with contextlib.suppress(psutil.Error), process.oneshot():
                parent = process.ppid()
                name = _name_of(process) if parent == launcher.pid else names.get(parent, _LAUNCHER)
                names[process.pid] = name
                memory, times = process.memory_info().rss, process.cpu_times()
                pid, earlier, seconds = found.get(name, (process.pid, 0, 0.0))
                found[name] = _Usage(pid, earlier + memory, seconds + times.user + times.system)
    return found


def _name_of(child: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        if (name := service_of(child.cmdline())) is not None:
            return name
        if child.name().startswith(("redis", "valkey")):
            return _REDIS
    return _LAUNCHER


def _order(name: str) -> tuple[str, int]:
    service, _, index = name.rpartition("-")
    return (service, int(index)) if index.isdecimal() else (name, 0)
