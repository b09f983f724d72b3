"""How worker processes are confined, in the template before the first fork and in each worker after it."""

from __future__ import annotations

import os
import resource
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rollmesh.tasks.sandbox import identity, kernel, reach
from rollmesh.tasks.sandbox.resource_limits import ResourceLimits, apply_limits, own_address_space_bytes

_PROCESS_COUNT = 64
_FILE_BYTES = 256 << 20
_OPEN_FILE_COUNT = 256
_CPU_MARGIN_SECONDS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfinement:
    """What this machine lets us do to workers."""

    own_uids: bool
    """Whether every worker gets a uid of its own (needs root and an interpreter that others can reach)."""
    owner_pid: int
    """The template: workers of two templates share no uid."""
    memory_limit_bytes: int
    """Address space a worker may add to what it is born with."""

    def uid(self, birth: int) -> int | None:
        """The uid of the worker with this birth number; None when workers keep that of the service."""
        return identity.own_uid(birth, self.owner_pid) if self.own_uids else None


def prepare(memory_limit_bytes: int) -> WorkerConfinement:
    """Make ready for workers of other uids, in the template process; falls back to none."""
    own_uids = identity.can_become(identity.own_uid(0))
    if own_uids:
        try:
            reach.expose(reach.interpreter_folders())
        except OSError:
            own_uids = False
    return WorkerConfinement(own_uids=own_uids, owner_pid=os.getpid(), memory_limit_bytes=memory_limit_bytes)


def confine_worker(confinement: WorkerConfinement, birth: int) -> None:
    """Confine this process for good; runs in a fresh worker before it reads anything."""
    os.setsid()
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")
    uid = confinement.uid(birth)
    if uid is not None:
        identity.become(uid)
    with suppress(OSError):
        kernel.refuse_new_privileges()
        kernel.set_dumpable(False)
        kernel.die_with_parent()
        kernel.adopt_orphans()
    limits = ResourceLimits(
        address_space_bytes=own_address_space_bytes() + confinement.memory_limit_bytes,
        cpu_seconds=resource.RLIM_INFINITY,
        process_count=_PROCESS_COUNT,
        file_bytes=_FILE_BYTES,
        open_file_count=_OPEN_FILE_COUNT,
    )
    apply_limits(limits, own_uid=uid is not None)


def allow_cpu(seconds: float) -> None:
    """Let this process use so much more processor time; past it the kernel ends it, even if nobody watches."""
    allowed = int(time.process_time() + seconds) + _CPU_MARGIN_SECONDS
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def sweep(pid: int, uid: int | None) -> None:
    """Kill a worker and all it started: its session, and with a uid of its own everything that has it."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    if uid is not None:
        kill_everybody(uid)


def kill_everybody(uid: int) -> None:
    """Kill every process of a uid of ours, however fast they fork."""
    child = os.fork()
    if child == 0:
        # As that uid, "everybody" is exactly what the worker left behind.
        try:
            identity.become(uid)
            os.kill(-1, signal.SIGKILL)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
