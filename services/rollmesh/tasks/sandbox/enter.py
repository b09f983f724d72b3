"""What a child does between fork and exec to confine itself."""

from __future__ import annotations

import os
import resource
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NoReturn

from rollmesh.tasks.sandbox import identity, kernel, reach
from rollmesh.tasks.sandbox.limits import ResourceLimits, apply_limits

NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
    | kernel.CLONE_NEWNS
)
"""What code gets for itself; any user may have these, where the machine allows user namespaces at all."""

_SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_FIRST_OTHER_DESCRIPTOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What the child is confined to."""

    limits: ResourceLimits
    uid: int | None
    """Uid to become, one that runs nothing else; None keeps the uid of this process."""
    namespaces: bool
    """Whether to leave this process's namespaces for new ones."""
    folder: str
    """Working folder on disk, used when the child cannot have private scratch space in memory."""
    scratch_bytes: int
    """Size of each private scratch space."""


def enter(confinement: Confinement, script_name: str, script: bytes) -> None:
    """Confine this process and leave ``script`` in its working folder; runs in a forked child."""
    os.umask(0o077)
    if confinement.uid is not None:
        reach.expose([Path(sys.base_prefix).resolve()])
        identity.become(confinement.uid)
    with suppress(OSError):
        kernel.refuse_new_privileges()
    folder = confinement.folder
    own_process_count = confinement.uid is not None
    if confinement.namespaces:
        _new_namespaces()
        own_process_count = True
        _become_first_process()
        folder = _private_scratch(confinement.scratch_bytes) or folder
    with suppress(OSError):
        kernel.die_with_parent()
    os.chdir(folder)
    Path(script_name).write_bytes(script)
    apply_limits(confinement.limits, own_uid=own_process_count)


def _new_namespaces() -> None:
    """Move to new user, process, network, IPC, name and mount namespaces, with the same uid and no privileges left."""
    uid, gid = os.getuid(), os.getgid()
    kernel.unshare(NAMESPACES)
    # After a change of uid the files below /proc/self belong to root until this is undone.
    kernel.set_dumpable(True)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")


def _become_first_process() -> None:
    """Continue as process 1 of the new namespace: when it ends, the kernel ends all that it started."""
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
    """Cover the shared scratch folders with private ones in memory; the first is the working folder."""
    interpreter = os.path.realpath(sys.base_prefix)
    covered = []
    for folder in _SCRATCH_FOLDERS:
        if interpreter.startswith(f"{folder}/") or not os.path.isdir(folder):
            continue
        with suppress(OSError):
            flags = kernel.MS_NOSUID | kernel.MS_NODEV
            kernel.mount("tmpfs", folder, "tmpfs", flags, f"size={size_bytes},mode=700")
            covered.append(folder)
    return covered[0] if covered else None


@lru_cache(maxsize=8)
def namespaces_allowed(uid: int | None) -> bool:
    """Whether this process, once it is ``uid`` (None: as it is), may have new namespaces; tried out in a child."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            if uid is not None:
                identity.become(uid)
            _new_namespaces()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0
