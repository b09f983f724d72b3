"""What ends the workers' remains when their template is killed: a small process that waits for just that.

A killed template takes its workers along, but not what they have started. Where every worker has a uid of its own, that
is found by it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress

import psutil

from rollmesh.reward.pool.confinement import WorkerConfinement, kill_everybody
from rollmesh.tasks.sandbox import identity, kernel

_WORD = signal.SIGHUP
_ROUNDS = 200
_PAUSE_SECONDS = 0.05
"""A worker that was just being born may get its uid, and start something, after the first look."""
_QUIET_ROUNDS = 10
_LATE_SECONDS = 0.5
"""A new template takes longer than that to load before it forks a worker."""


def post_watchman(confinement: WorkerConfinement, inherited: int) -> int | None:
    """Fork the watchman of this template; returns its pid, None where workers have no uids of their own.

    It closes ``inherited``, the descriptor by whose end the service knows that the template has gone.
    """
    if not confinement.own_uids:
        return None
    template = os.getpid()
    signal.pthread_sigmask(signal.SIG_BLOCK, {_WORD})
    pid = os.fork()
    if pid == 0:
        try:
            os.close(inherited)
            os.setsid()
            _end_remains(confinement, _end_of(template))
        finally:
            os._exit(0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {_WORD})
    return pid


def relieve_watchman(pid: int) -> None:
    """End the watchman: the template has swept up itself."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _end_of(template: int) -> float:
    """Wait for it; returns when it was, in Unix seconds."""
    kernel.hear_of_parents_end(_WORD)
    while os.getppid() == template:
        signal.sigwait({_WORD})
    return time.time()


def _end_remains(confinement: WorkerConfinement, end: float) -> None:
    uids = {confinement.uid(birth) for birth in range(identity.SLOTS_PER_PROCESS)}
    quiet = 0
    for _ in range(_ROUNDS):
        # Where uids are few, a later template may get the same ones: what began after the end is not of this one.
        old = [p.info for p in psutil.process_iter(["uids", "create_time"]) if p.info["uids"]]
        found = {info["uids"].real for info in old if info["create_time"] < end + _LATE_SECONDS} & uids
        for uid in found:
            kill_everybody(int(uid))
        quiet = 0 if found else quiet + 1
        if quiet == _QUIET_ROUNDS:
            return
        time.sleep(_PAUSE_SECONDS)
