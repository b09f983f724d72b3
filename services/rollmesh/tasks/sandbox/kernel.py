"""Linux calls that Python does not wrap; on other systems each raises OSError(ENOSYS).

The filter of system calls rejects those that start processes, hold memory outside the address space, or create
namespaces. A process that cannot start another one cannot use more memory than its own limit, threads included. Memory
outside its address space (memory files, System V segments, a new tmpfs) is rejected too.
"""

import ctypes
import errno
import os
import platform
import signal
import struct
import sys
from functools import lru_cache
from typing import Any

CLONE_NEWNS = 0x0002_0000
OWN_NAMESPACES = CLONE_NEWNS | 0x0400_0000 | 0x0800_0000 | 0x1000_0000 | 0x2000_0000 | 0x4000_0000
"""Of mounts, names, IPC, users, processes and networks; for any user where the machine allows user namespaces."""

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000

MOUNT_ATTR_RDONLY = 0x1
MOUNT_ATTR_NOSUID = 0x2
MOUNT_ATTR_NODEV = 0x4

_MNT_DETACH = 0x2
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_SYS_MOUNT_SETATTR = 442  # the same on every architecture; glibc has a wrapper since 2.36

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_SECCOMP = 22
_PR_SET_CHILD_SUBREAPER = 36
_PR_GET_CHILD_SUBREAPER = 37
_PR_SET_NO_NEW_PRIVS = 38
_CLONE_THREAD = 0x1_0000
_CLONE_NEW_ANYTHING = 0x7E02_0080  # every CLONE_NEW* flag
_FOREIGN_NUMBERS = 0x4000_0000
"""Lowest number of the x32 calls of an x86-64 kernel."""
# Rejected: unshare setns mount umount2 pivot_root chroot memfd_create shmget msgget semget add_key request_key keyctl
# bpf perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev; the rest have one number everywhere:
# io_uring_setup open_tree move_mount fsopen fsmount mount_setattr memfd_secret.
_COMMON = (425, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435


def unshare(flags: int) -> None:
    """Move to new namespaces of the kinds in ``flags``."""
    _checked(_libc().unshare(flags), "unshare")


def fork_without_hooks() -> int:
    """Fork without the hooks of ``os.register_at_fork``; the child has only the thread that called this."""
    # PyDLL keeps the interpreter's lock, which no other thread of the child could release.
    child: int = ctypes.PyDLL(None).fork()
    if child < 0:
        raise OSError(errno.EAGAIN, "fork")
    return child


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Mount ``source`` at ``target``."""
    result = _libc().mount(source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode())
    _checked(result, f"mount {target}")


def restrict_mount(target: str, attributes: int, *, recursive: bool = True) -> None:
    """Add attributes to the mount at ``target`` and to all mounts below it; needs Linux 5.12."""
    values = (ctypes.c_uint64 * 4)(attributes)
    flags = _AT_RECURSIVE if recursive else 0
    result = _libc().syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(_AT_FDCWD),
        target.encode(),
        ctypes.c_uint(flags),
        values,
        ctypes.c_size_t(ctypes.sizeof(values)),
    )
    _checked(result, f"mount_setattr {target}")


def change_root(folder: str) -> None:
    """Make the mount at ``folder`` the root folder and detach the old root."""
    os.chdir(folder)
    _checked(_libc().pivot_root(b".", b"."), f"pivot_root {folder}")
    # The old root now covers the new one.
    _checked(_libc().umount2(b".", _MNT_DETACH), "umount2 of the old root")
    os.chdir("/")


def filter_system_calls(program: bytes) -> None:
    """Apply a seccomp filter (``call_filter``) to this process and its descendants, irrevocably."""
    instructions = ctypes.create_string_buffer(program, len(program))
    packed = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(instructions))
    described = ctypes.create_string_buffer(packed, len(packed))
    unused = ctypes.c_ulong(0)
    mode = ctypes.c_ulong(2)  # SECCOMP_MODE_FILTER
    _checked(_libc().prctl(_PR_SET_SECCOMP, mode, ctypes.byref(described), unused, unused), "seccomp")


def die_with_parent(number: signal.Signals = signal.SIGKILL) -> None:
    """Request a signal when the parent process (the thread that forked) ends."""
    _prctl(_PR_SET_PDEATHSIG, int(number))


def adopt_orphans(adopt: bool = True) -> None:
    """Become the parent of orphaned descendants, so that they can be reaped; stop that with ``adopt=False``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(adopt))


def adopts_orphans() -> bool:
    """Return True if this process adopts orphaned descendants."""
    adopts = ctypes.c_int()
    _checked(_libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(adopts)), f"prctl {_PR_GET_CHILD_SUBREAPER}")
    return bool(adopts.value)


def set_dumpable(dumpable: bool) -> None:
    """Allow or forbid processes of the same uid to inspect this one (ptrace, /proc/<pid>/fd)."""
    _prctl(_PR_SET_DUMPABLE, int(dumpable))


def refuse_new_privileges() -> None:
    """Ignore the setuid bit of programs, for this process and its descendants."""
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)


def _prctl(option: int, value: int) -> None:
    unused = ctypes.c_ulong(0)
    _checked(_libc().prctl(option, ctypes.c_ulong(value), unused, unused, unused), f"prctl {option}")


def _checked(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


@lru_cache(maxsize=1)
def _libc() -> Any:
    if sys.platform != "linux":
        raise OSError(errno.ENOSYS, f"not on {sys.platform}")
    return ctypes.CDLL(None, use_errno=True)


_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_ARCHITECTURES = {
    "x86_64": (
        0xC000_003E,
        56,
        (57, 58),
        (272, 308, 165, 166, 155, 161, 319, 29, 68, 64, 248, 249, 250, 321, 298, 323, 101, 310, 311, *_COMMON),
    ),
    "aarch64": (
        0xC000_00B7,
        220,
        (),
        (97, 268, 40, 39, 41, 51, 279, 194, 186, 190, 217, 218, 219, 280, 241, 282, 117, 270, 271, *_COMMON),
    ),
}
"""(number of the architecture in the audit, that of clone, those of other forks, rejected ones) by machine."""


def call_filter(*, may_fork: bool) -> bytes:
    """Return the filter as an array of struct sock_filter: a chain of tests; each returns or falls through.

    Raises OSError if the architecture is unknown.
    """
    if platform.machine() not in _ARCHITECTURES:
        raise OSError(errno.ENOSYS, f"no system call numbers for {platform.machine()}")
    audit_number, clone, forks, rejected = _ARCHITECTURES[platform.machine()]
    reject, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    steps = [
        _step(_LOAD, _ARCHITECTURE_AT),
        _step(_EQUAL, audit_number, matching=1),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER_AT),
        *_returns(_AT_LEAST, _FOREIGN_NUMBERS, reject),
        # A filter cannot read the arguments of clone3; without clone3, libraries use clone.
        *_returns(_EQUAL, _CLONE3, missing),
        *(step for number in (*rejected, *(() if may_fork else forks)) for step in _returns(_EQUAL, number, reject)),
        _step(_EQUAL, clone, matching=1),
        _step(_RETURN, _ALLOW),
        _step(_LOAD, _FIRST_ARGUMENT_AT),
        *_returns(_ANY_BIT, _CLONE_NEW_ANYTHING, reject),
        *([] if may_fork else _returns(_ANY_BIT, _CLONE_THREAD, _ALLOW)),
        _step(_RETURN, _ALLOW if may_fork else reject),
    ]
    return b"".join(steps)


def _step(kind: int, value: int, *, matching: int = 0, otherwise: int = 0) -> bytes:
    """Encode a step; a test skips ``matching`` steps if the loaded value passes, else ``otherwise``."""
    return struct.pack("HBBI", kind, matching, otherwise, value)


def _returns(kind: int, value: int, result: int) -> tuple[bytes, bytes]:
    return _step(kind, value, otherwise=1), _step(_RETURN, result)
