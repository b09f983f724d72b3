"""The orphan reaper: a process that kills the workers' leftover processes if their template is killed.

The workers of a killed template die with it, but not the processes that they started. If every worker has a separate
uid, the reaper finds these processes by uid.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from rollmesh.reward.pool.confinement import WorkerConfinement, kill_uid
from rollmesh.tasks.sandbox import identity, kernel

_EXIT_SIGNAL = signal.SIGHUP
_SCANS = 200
_SCAN_SECONDS = 0.05
"""Time between two scans; a worker that was just forked may get its uid and start a process after the first scan."""
_QUIET_SCANS = 10
_LATE_START_SECONDS = 0.5
"""Processes started up to this time after the template's exit are killed; a new template takes longer to load."""


def start_orphan_reaper(confinement: WorkerConfinement, inherited: int) -> int | None:
    """Fork the orphan reaper of this template; returns its pid, or None if workers have no separate uids.

    The reaper closes the descriptor ``inherited``: the service detects the template's exit when it closes.
    """
    if not confinement.own_uids:
        return None
    template = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {_EXIT_SIGNAL})
    pid = os.fork()
    if pid == 0:
        try:
            os.close(inherited)
            os.setsid()
            _kill_leftovers(confinement, _wait_for_exit(template))
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_EXIT_SIGNAL})
    return pid


def stop_orphan_reaper(pid: int) -> None:
    """Stop the orphan reaper, because the template has killed its workers itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _wait_for_exit(template: int) -> float:
    """Wait for the template's exit; returns its time in Unix seconds."""
    kernel.signal_on_parent_exit(_EXIT_SIGNAL)
    while os.getppid() == template:
        signal.sigwait({_EXIT_SIGNAL})
    return time.time()


def _kill_leftovers(confinement: WorkerConfinement, end: float) -> None:
    uids = {confinement.uid(birth) for birth in range(identity.SLOTS_PER_PROCESS)}
    quiet = 0
    for _ in range(_SCANS):
        # A later template may reuse the same uids: processes that started after the exit are not of this template.
        old = [p.info for p in psutil.process_iter(["uids", "create_time"]) if p.info["uids"]]
        found = {info["uids"].real for info in old if info["create_time"] < end + _LATE_START_SECONDS} & uids
        for uid in found:
            kill_uid(int(uid))
        quiet = 0 if found else quiet + 1
        if quiet == _QUIET_SCANS:
            return
        time.sleep(_SCAN_SECONDS)
