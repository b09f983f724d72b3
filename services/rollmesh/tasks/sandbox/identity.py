"""Uids of our own, so that limits count and signals reach only what is ours. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

from rollmesh.tasks.sandbox import kernel

SLOTS_PER_PROCESS = 256
"""Uids that one process can tell apart."""

OWN_UID_VARIABLE = "SANDBOX_OWN_UID"


def own_uid(slot: int, owner_pid: int | None = None) -> int:
    """A uid that nothing else uses: from the upper half of the ids that exist here, by owner process and slot."""
    half = max(1, min(_mapped_ids(), 2**31) // 2)
    pid = os.getpid() if owner_pid is None else owner_pid
    return half + (pid * SLOTS_PER_PROCESS + slot % SLOTS_PER_PROCESS) % half


def become(uid: int) -> None:
    """Turn this process into ``uid`` for good, with no groups and no way back; needs root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.refuse_new_privileges()
    os.environ[OWN_UID_VARIABLE] = str(uid)


def has_own_uid() -> bool:
    """Whether this process, or the one that started it, got its uid by ``become``."""
    return os.environ.get(OWN_UID_VARIABLE) == str(os.getuid())


def is_root() -> bool:
    """Whether this process is root, if only in its own user namespace."""
    return os.geteuid() == 0


def can_become(uid: int) -> bool:
    """Whether ``become(uid)`` works here, tried out in a child: root may lack the capability or the uid."""
    if not is_root():
        return False
    child = os.fork()
    if child == 0:
        status = 1
        try:
            become(uid)
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0


def _mapped_ids() -> int:
    """One more than the largest uid of this user namespace."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        return max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    except (OSError, ValueError):
        return 2**16
