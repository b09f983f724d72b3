"""Steps of a child between fork and exec to confine itself."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache, partial
from pathlib import Path
from typing import NoReturn

from rollmesh.tasks.sandbox import host_folders, identity, kernel
from rollmesh.tasks.sandbox.identity import ResourceLimits, apply_limits

NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWNS
)
"""Namespaces that code gets; available to any user where the machine allows user namespaces."""

_SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_TRIAL_SCRATCH_BYTES = 1 << 20


class Isolation(Enum):
    """Isolation of code that the kernel of this machine allows, strongest first."""

    SEALED = "namespaces and a separate root folder"
    NAMESPACES = "namespaces; the files of the host stay"
    NONE = "a uid and resource limits only"


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """Settings of a confined child."""

    limits: ResourceLimits
    uid: int | None
    """Dedicated uid of the child; None to keep the uid of this process."""
    isolation: Isolation
    may_fork: bool
    """True if code may start processes; each then has its own memory limit."""
    folder: str
    """Working folder on disk where there is no private scratch space; otherwise the mount point of the new root."""
    scratch_bytes: int
    """Size of the private scratch space."""


def enter(confinement: Confinement, script_name: str, script: bytes) -> None:
    """Confine this process and leave ``script`` in its working folder; runs in a forked child."""
    os.umask(0o077)
    if confinement.uid is not None:
        for descriptor in range(3):  # pipes: only their owner may open /dev/stdout
            os.fchown(descriptor, confinement.uid, -1)
    folder = _build(confinement)
    with suppress(OSError):
        kernel.die_with_parent()
    os.chdir(folder)
    Path(script_name).write_bytes(script)
    with suppress(OSError):  # not on every kernel and architecture; the measured level reports it
        kernel.restrict_system_calls(may_fork=confinement.may_fork)
    # Last: if the process that forked this one is larger than the limit, no further memory can be allocated.
    own_process_count = confinement.uid is not None or confinement.isolation is not Isolation.NONE
    apply_limits(confinement.limits, own_uid=own_process_count)


def _build(confinement: Confinement) -> str:
    """Isolate this process; return its working folder."""
    uid, folder = confinement.uid, confinement.folder
    if uid is not None:
        host_folders.expose([Path(sys.base_prefix).resolve()])
        identity.become(uid)
    with suppress(OSError):
        kernel.refuse_new_privileges()
    if confinement.isolation is Isolation.NONE:
        return folder
    _leave_threads()
    _new_namespaces()
    _become_first_process()
    if confinement.isolation is Isolation.SEALED:
        host_folders.seal(folder, confinement.scratch_bytes)
        return host_folders.WORKING_FOLDER
    return _private_scratch(confinement.scratch_bytes) or folder


def _leave_threads() -> None:
    """Continue in a process without other threads, as new namespaces require.

    Libraries start threads in every fork of a process that uses them, for example OpenTelemetry's export of spans.
    """
    if len(os.listdir("/proc/self/task")) > 1 and (child := kernel.fork_without_hooks()):
        _wait_for(child)


def _new_namespaces() -> None:
    """Move to new user, process, network, IPC, name and mount namespaces, with the same uid and no privileges."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(NAMESPACES)
    # A change of uid makes root the owner of the files below /proc/self; this undoes it.
    kernel.set_dumpable(True)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _become_first_process() -> None:
    """Continue as process 1 of the new namespace: when it ends, the kernel kills all processes of the namespace."""
    child = os.fork()
    if child:
        _wait_for(child)
    # The waiting parent holds no descriptors, so it cannot keep a pipe open.


def _wait_for(child: int) -> NoReturn:
    os.closerange(0, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    with suppress(OSError):
        kernel.die_with_parent()
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _private_scratch(size_bytes: int) -> str | None:
    """Cover the shared scratch folders with a private one in memory; return the first, as the working folder."""
    interpreter = os.path.realpath(sys.base_prefix)
    flags = kernel.MS_NOSUID | kernel.MS_NODEV
    covered: list[str] = []
    for folder in _SCRATCH_FOLDERS:
        if interpreter.startswith(f"{folder}/") or not os.path.isdir(folder):
            continue
        with suppress(OSError):
            if covered:
                kernel.mount(covered[0], folder, flags=kernel.MS_BIND)
            else:
                kernel.mount("tmpfs", folder, "tmpfs", flags, f"size={size_bytes},mode=700")
            covered.append(folder)
    return covered[0] if covered else None


@lru_cache(maxsize=8)
def strongest_isolation(uid: int | None) -> Isolation:
    """Return the strongest isolation that this process can have as ``uid`` (None: unchanged), tested in children."""
    interpreter = os.path.realpath(sys.executable)
    limits = ResourceLimits(address_space_bytes=0, cpu_seconds=0, process_count=0, file_bytes=0, open_file_count=0)
    for isolation in Isolation:
        with tempfile.TemporaryDirectory(prefix="rollmesh-isolation-", ignore_cleanup_errors=True) as folder:
            if uid is not None:
                os.chown(folder, uid, uid)
            trial = Confinement(
                limits=limits,
                uid=uid,
                isolation=isolation,
                may_fork=False,
                folder=folder,
                scratch_bytes=_TRIAL_SCRATCH_BYTES,
            )
            if isolation is Isolation.NONE or identity.succeeds_in_child(partial(_try, trial, interpreter)):
                return isolation
    raise AssertionError("Isolation.NONE has no requirements")


def _try(trial: Confinement, interpreter: str) -> None:
    _build(trial)
    if not os.access(interpreter, os.X_OK):
        raise PermissionError(f"{interpreter}: not executable in this isolation")
