"""Uids and resource limits of a confined process, so that they apply to that process and no other."""

import os
import resource
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from rollmesh.tasks.sandbox import kernel

SLOTS_PER_PROCESS = 256
"""Number of distinct uids of one process."""

OWN_UID_VARIABLE = "SANDBOX_OWN_UID"


def own_uid(slot: int, owner_pid: int | None = None) -> int:
    """Return an unused uid: from the upper half of the ids in this namespace, by owner process and slot."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        id_count = max(int(first) + int(count) for first, _, count in map(str.split, lines))
    except (OSError, ValueError):
        id_count = 2**16
    half = max(1, min(id_count, 2**31) // 2)
    pid = os.getpid() if owner_pid is None else owner_pid
    return half + (pid * SLOTS_PER_PROCESS + slot % SLOTS_PER_PROCESS) % half


def become(uid: int) -> None:
    """Change the uid of this process to ``uid``, irrevocably and without groups; needs root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.refuse_new_privileges()
    os.environ[OWN_UID_VARIABLE] = str(uid)


def has_own_uid() -> bool:
    """Return True if this process, or its parent, got its uid from ``become``."""
    return os.environ.get(OWN_UID_VARIABLE) == str(os.getuid())


def is_root() -> bool:
    """Return True if this process is root, possibly only in its own user namespace."""
    return os.geteuid() == 0


def can_become(uid: int) -> bool:
    """Tell whether ``become(uid)`` works, by a test in a child: root may lack the capability or the uid."""
    return is_root() and succeeds_in_child(lambda: become(uid))


def succeeds_in_child(action: Callable[[], None]) -> bool:
    """Run ``action`` in a forked child; return True if it raises no error."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            action()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimits:
    """Resources that one confined process and its children may use."""

    address_space_bytes: int
    """Virtual memory of each process."""
    cpu_seconds: int
    """Processor time of each process."""
    process_count: int
    """Processes and threads of the uid at once; does not apply to root."""
    file_bytes: int
    """Size of each file written."""
    open_file_count: int
    """Open files of each process."""


def apply_limits(limits: ResourceLimits, *, own_uid: bool) -> None:
    """Limit this process irrevocably; lower limits stay.

    For a shared uid (``own_uid`` false) the process limit is raised by the threads that the uid already runs.
    """
    process_count = limits.process_count
    for process in () if own_uid else psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended
            if process.uids().real == os.getuid():
                process_count += process.num_threads()
    for kind, value in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_CPU, limits.cpu_seconds),
        (resource.RLIMIT_NPROC, process_count),
        (resource.RLIMIT_FSIZE, limits.file_bytes),
        (resource.RLIMIT_NOFILE, limits.open_file_count),
        (resource.RLIMIT_AS, limits.address_space_bytes),
    ):
        finite = [limit for limit in (value, resource.getrlimit(kind)[1]) if limit != resource.RLIM_INFINITY]
        lowest = min(finite, default=resource.RLIM_INFINITY)
        resource.setrlimit(kind, (lowest, lowest))
