"""What a child does between fork and exec to confine itself; every step that the machine refuses is left out."""

from __future__ import annotations

import os
import resource
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from rollmesh.tasks.sandbox import identity, kernel, reach
from rollmesh.tasks.sandbox.limits import ResourceLimits, apply_limits

_SCRATCH_FOLDERS = ("/tmp", "/var/tmp", "/dev/shm")
_FIRST_OTHER_DESCRIPTOR = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Confinement:
    """What the child is confined to."""

    limits: ResourceLimits
    uid: int | None
    """Uid to become, one that runs nothing else; None keeps the uid of this process."""
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
    if _new_namespaces():
        own_process_count = True
        _become_first_process()
        folder = _private_scratch(confinement.scratch_bytes) or folder
    with suppress(OSError):
        kernel.die_with_parent()
    os.chdir(folder)
    Path(script_name).write_bytes(script)
    apply_limits(confinement.limits, own_uid=own_process_count)


def _new_namespaces() -> bool:
    """New user, process, network, IPC, name and mount namespaces; False where the machine allows none."""
    uid, gid = os.getuid(), os.getgid()
    flags = kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWIPC
    try:
        kernel.unshare(flags | kernel.CLONE_NEWUTS | kernel.CLONE_NEWNS)
    except OSError:
        return False
    # After a change of uid the files below /proc/self belong to root until this is undone.
    kernel.set_dumpable(True)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
    Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    return True


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


def preparation(confinement: Confinement, script_name: str, script: bytes) -> Callable[[], None]:
    """``enter`` for ``subprocess.Popen(preexec_fn=...)``; the child dies with status 125 when it cannot be confined."""

    def run() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        try:
            enter(confinement, script_name, script)
        except BaseException as error:
            os.write(2, f"confinement failed: {type(error).__name__}: {error}\n".encode())
            os._exit(125)

    return run
