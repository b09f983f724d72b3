"""Confinement of worker processes: in the template before the first fork, and in each worker after its fork."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Collection
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
    """Confinement of workers that this machine supports."""

    own_uids: bool
    """True if every worker gets a separate uid (needs root and an interpreter that other uids can read)."""
    owner_pid: int
    """Process id of the template: workers of two templates share no uid."""
    memory_limit_bytes: int
    """Address space that a worker may add to its size after the fork."""

    def uid(self, birth: int) -> int | None:
        """Return the uid of the worker with this birth number; None if workers keep the uid of the service."""
        return identity.own_uid(birth, self.owner_pid) if self.own_uids else None

    def free_birth(self, birth: int, living: Collection[int]) -> int:
        """Return the first birth number from ``birth`` on whose uid no worker with a number in ``living`` has.

        Raises RuntimeError if all uids are in use: their processes are killed with their worker.
        """
        if not self.own_uids:
            return birth
        taken = {self.uid(each) for each in living}
        for candidate in range(birth, birth + identity.SLOTS_PER_PROCESS):
            if self.uid(candidate) not in taken:
                return candidate
        raise RuntimeError(f"all {len(taken)} uids of this template have a living worker")

    def most_workers(self) -> int | None:
        """Return the number of workers that can have a separate uid at once; None if workers have none.

        One uid is left for a worker that starts while another one dies.
        """
        if not self.own_uids:
            return None
        return max(1, len({self.uid(birth) for birth in range(identity.SLOTS_PER_PROCESS)}) - 1)


def prepare(memory_limit_bytes: int) -> WorkerConfinement:
    """Prepare the template process for workers with separate uids; fall back to the uid of the service."""
    own_uids = identity.can_become(identity.own_uid(0))
    if own_uids:
        try:
            reach.expose(reach.interpreter_folders())
        except OSError:
            own_uids = False
    return WorkerConfinement(own_uids=own_uids, owner_pid=os.getpid(), memory_limit_bytes=memory_limit_bytes)


def confine_worker(confinement: WorkerConfinement, birth: int) -> None:
    """Confine this process irreversibly; runs in a new worker before it reads requests."""
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
    """Allow this process ``seconds`` more of processor time; the kernel kills it after that."""
    allowed = int(time.process_time() + seconds) + _CPU_MARGIN_SECONDS
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (allowed if hard == resource.RLIM_INFINITY else min(allowed, hard), hard))


def kill_worker(pid: int, uid: int | None) -> None:
    """Kill a worker and its children: its session, and every process of its uid if the uid is separate."""
    for kill in (os.killpg, os.kill):
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
    if uid is not None:
        kill_uid(uid)


def kill_uid(uid: int) -> None:
    """Kill every process of a worker's uid, even if they fork fast."""

    def kill_all() -> None:
        # With that uid, kill(-1) reaches exactly the processes that the worker left behind.
        identity.become(uid)
        os.kill(-1, signal.SIGKILL)

    identity.succeeds_in_child(kill_all)
