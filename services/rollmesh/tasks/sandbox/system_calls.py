"""Filter of system calls that start processes, hold memory outside the address space, or create namespaces.

A process that cannot start another one cannot use more memory than its own limit, threads included. Memory outside its
address space (memory files, System V segments, a new tmpfs) is rejected too.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping
from dataclasses import dataclass

from rollmesh.tasks.sandbox import kernel

_CLONE_THREAD = 0x1_0000
_CLONE_NEW_ANYTHING = 0x7E02_0080  # every CLONE_NEW* flag

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCHITECTURE_AT, _FIRST_ARGUMENT_AT = 0, 4, 16
_ALLOW, _KILL, _ERROR = 0x7FFF_0000, 0x8000_0000, 0x0005_0000
_FOREIGN_NUMBERS = 0x4000_0000
"""Lowest number of the x32 calls of an x86-64 kernel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    audit_number: int
    clone: int
    forks: tuple[int, ...]
    rejected: tuple[int, ...]


# Rejected: unshare setns mount umount2 pivot_root chroot memfd_create shmget msgget semget add_key request_key keyctl
# bpf perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev; the rest have one number everywhere:
# io_uring_setup open_tree move_mount fsopen fsmount mount_setattr memfd_secret.
_COMMON = (425, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "x86_64": _Architecture(
        audit_number=0xC000_003E,
        clone=56,
        forks=(57, 58),
        rejected=(272, 308, 165, 166, 155, 161, 319, 29, 68, 64, 248, 249, 250, 321, 298, 323, 101, 310, 311, *_COMMON),
    ),
    "aarch64": _Architecture(
        audit_number=0xC000_00B7,
        clone=220,
        forks=(),
        rejected=(97, 268, 40, 39, 41, 51, 279, 194, 186, 190, 217, 218, 219, 280, 241, 282, 117, 270, 271, *_COMMON),
    ),
}


def restrict(*, may_fork: bool) -> None:
    """Reject these calls for this process and its descendants, irrevocably.

    Raises OSError if the kernel does not support filters, or if the architecture is unknown.
    """
    kernel.filter_system_calls(call_filter(may_fork=may_fork))


def call_filter(*, may_fork: bool) -> bytes:
    """Return the filter as an array of struct sock_filter. Raises OSError if the architecture is unknown."""
    found = _ARCHITECTURES.get(platform.machine())
    if found is None:
        raise OSError(errno.ENOSYS, f"no system call numbers for {platform.machine()}")
    return _program(found, may_fork=may_fork)


def _program(architecture: _Architecture, *, may_fork: bool) -> bytes:
    """Build the filter: a chain of tests; each returns or falls through to the next."""
    reject, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    rejected = architecture.rejected if may_fork else (*architecture.rejected, *architecture.forks)
    steps = [
        _load(_ARCHITECTURE_AT),
        _test(_EQUAL, architecture.audit_number, matching=1, otherwise=0),
        _result(_KILL),
        _load(_NUMBER_AT),
        *_returns(_AT_LEAST, _FOREIGN_NUMBERS, reject),
        # A filter cannot read the arguments of clone3; without clone3, libraries use clone.
        *_returns(_EQUAL, _CLONE3, missing),
        *(step for number in rejected for step in _returns(_EQUAL, number, reject)),
        _test(_EQUAL, architecture.clone, matching=1, otherwise=0),
        _result(_ALLOW),
        _load(_FIRST_ARGUMENT_AT),
        *_returns(_ANY_BIT, _CLONE_NEW_ANYTHING, reject),
        *([] if may_fork else _returns(_ANY_BIT, _CLONE_THREAD, _ALLOW)),
        _result(_ALLOW if may_fork else reject),
    ]
    return b"".join(steps)


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _test(kind: int, value: int, *, matching: int, otherwise: int) -> bytes:
    """Skip ``matching`` steps if the loaded value passes, else ``otherwise``."""
    return struct.pack("HBBI", kind, matching, otherwise, value)


def _returns(kind: int, value: int, result: int) -> tuple[bytes, bytes]:
    return _test(kind, value, matching=0, otherwise=1), _result(result)


def _result(result: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, result)
