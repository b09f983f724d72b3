"""The system calls that code may not make: those that start processes, hold memory aside, or build namespaces.

A process that cannot start another one cannot use more memory than its own limit, threads included. What it could hold
outside of its address space (memory files, System V segments, a tmpfs of its own) is refused too.
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
"""x32 calls of an x86-64 kernel, which have numbers of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Architecture:
    audit_number: int
    clone: int
    forks: tuple[int, ...]
    refused: tuple[int, ...]


# Refused: unshare setns mount umount2 pivot_root chroot memfd_create shmget msgget semget add_key request_key keyctl
# bpf perf_event_open userfaultfd ptrace process_vm_readv process_vm_writev; then those with one number on all machines:
# io_uring_setup open_tree move_mount fsopen fsmount mount_setattr memfd_secret.
_COMMON = (425, 428, 429, 430, 432, 442, 447)
_CLONE3 = 435
_ARCHITECTURES: Mapping[str, _Architecture] = {
    "x86_64": _Architecture(
        audit_number=0xC000_003E,
        clone=56,
        forks=(57, 58),
        refused=(272, 308, 165, 166, 155, 161, 319, 29, 68, 64, 248, 249, 250, 321, 298, 323, 101, 310, 311, *_COMMON),
    ),
    "aarch64": _Architecture(
        audit_number=0xC000_00B7,
        clone=220,
        forks=(),
        refused=(97, 268, 40, 39, 41, 51, 279, 194, 186, 190, 217, 218, 219, 280, 241, 282, 117, 270, 271, *_COMMON),
    ),
}


def restrict(*, may_fork: bool) -> None:
    """Refuse these calls to this process and all it starts, for good.

    Raises OSError where the kernel cannot or the architecture is unknown.
    """
    found = _ARCHITECTURES.get(platform.machine())
    if found is None:
        raise OSError(errno.ENOSYS, f"no system call numbers for {platform.machine()}")
    kernel.filter_system_calls(_program(found, may_fork=may_fork))


def _program(architecture: _Architecture, *, may_fork: bool) -> bytes:
    """The filter: a chain of tests, each of which returns or falls through to the next."""
    refuse, missing = _ERROR | errno.EPERM, _ERROR | errno.ENOSYS
    refused = architecture.refused if may_fork else (*architecture.refused, *architecture.forks)
    steps = [
        _load(_ARCHITECTURE_AT),
        _test(_EQUAL, architecture.audit_number, matching=1, otherwise=0),
        _answer(_KILL),
        _load(_NUMBER_AT),
        *_returns(_AT_LEAST, _FOREIGN_NUMBERS, refuse),
        # The arguments of clone3 are out of a filter's sight; without it libraries take clone.
        *_returns(_EQUAL, _CLONE3, missing),
        *(step for number in refused for step in _returns(_EQUAL, number, refuse)),
        _test(_EQUAL, architecture.clone, matching=1, otherwise=0),
        _answer(_ALLOW),
        _load(_FIRST_ARGUMENT_AT),
        *_returns(_ANY_BIT, _CLONE_NEW_ANYTHING, refuse),
        *([] if may_fork else _returns(_ANY_BIT, _CLONE_THREAD, _ALLOW)),
        _answer(_ALLOW if may_fork else refuse),
    ]
    return b"".join(steps)


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", _LOAD, 0, 0, offset)


def _test(kind: int, value: int, *, matching: int, otherwise: int) -> bytes:
    """Skip ``matching`` steps if the loaded value passes, else ``otherwise``."""
    return struct.pack("HBBI", kind, matching, otherwise, value)


def _returns(kind: int, value: int, result: int) -> tuple[bytes, bytes]:
    return _test(kind, value, matching=0, otherwise=1), _answer(result)


def _answer(result: int) -> bytes:
    return struct.pack("HBBI", _RETURN, 0, 0, result)
