"""Confinement of worker processes, measured in one of them, and the reaper of what a killed template leaves behind.

It begins in the template before the first fork, and ends in each worker after its fork. The measured level is a report,
not a guarantee: no level is a security boundary. The workers of a killed template die with it, but not the processes
that they started: the reaper finds these by uid if every worker has a separate one.
"""

import mmap
import os
import resource
import signal
import time
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from rollmesh.tasks.sandbox import host_folders, identity, kernel
from rollmesh.tasks.sandbox.identity import ResourceLimits, apply_limits
from rollmesh.tasks.sandbox.probe import SandboxLevel, probe_sandbox

_PROCESS_COUNT = 64
_FILE_BYTES = 256 << 20
_OPEN_FILE_COUNT = 256
_CPU_MARGIN_SECONDS = 2
_EXIT_SIGNAL = signal.SIGHUP
_SCANS = 200
_SCAN_SECONDS = 0.05
"""Time between two scans; a worker that was just forked may get its uid and start a process after the first scan."""
_QUIET_SCANS = 10
_LATE_START_SECONDS = 0.5
"""Processes started up to this time after the template's exit are killed; a new template takes longer to load."""


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
            host_folders.expose(host_folders.interpreter_folders())
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
        address_space_bytes=psutil.Process().memory_info().vms + confinement.memory_limit_bytes,
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


@dataclass(frozen=True, slots=True, kw_only=True)
class IsolationLevel:
    """Measured confinement of a worker process, and of the code of answers inside it."""

    uid: int
    own_uid: bool
    """True if no other process has the worker's uid, so limits and kills apply only to the worker's processes."""
    memory_limited: bool
    processes_limited: bool
    code: SandboxLevel

    @staticmethod
    def from_report(report: Mapping[str, Any]) -> "IsolationLevel":
        return IsolationLevel(**{**report, "code": SandboxLevel(**report["code"])})

    def properties(self) -> dict[str, bool]:
        worker = {name: getattr(self, name) for name in ("own_uid", "memory_limited", "processes_limited")}
        return {**worker, **{f"code_{name}": value for name, value in asdict(self.code).items()}}

    def __str__(self) -> str:
        present = [name.replace("_", " ") for name, value in self.properties().items() if value]
        missing = [name.replace("_", " ") for name, value in self.properties().items() if not value]
        return f"uid {self.uid}; has: {', '.join(present) or 'nothing'}; lacks: {', '.join(missing) or 'nothing'}"


def probe_worker(confinement: WorkerConfinement, birth: int) -> dict[str, object]:
    """Test the limits of this worker process; returns JSON values."""
    memory_limited = True
    with suppress(OSError, OverflowError, ValueError):
        mmap.mmap(-1, 2 * confinement.memory_limit_bytes).close()
        memory_limited = False
    return {
        "uid": os.getuid(),
        "own_uid": os.getuid() == confinement.uid(birth),
        "memory_limited": memory_limited,
        "processes_limited": not _can_fork_at_the_limit(),
        "code": asdict(probe_sandbox()),
    }


def _can_fork_at_the_limit() -> bool:
    """Tell whether a fork succeeds although the process limit forbids it: the limit does not apply to root."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (0, hard))
    try:
        child = os.fork()
    except OSError:
        return False
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


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
            kernel.die_with_parent(_EXIT_SIGNAL)
            while os.getppid() == template:
                signal.sigwait({_EXIT_SIGNAL})
            _kill_leftovers(confinement, time.time())
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


def _kill_leftovers(confinement: WorkerConfinement, end: float) -> None:
    """Kill what the workers of a template have started that ended at ``end`` (Unix seconds)."""
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
