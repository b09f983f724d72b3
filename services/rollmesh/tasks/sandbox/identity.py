"""Dedicated uids, so that limits and signals apply to our processes only. Needs root."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from rollmesh.tasks.sandbox import kernel

SLOTS_PER_PROCESS = 256
"""Number of distinct uids of one process."""

OWN_UID_VARIABLE = "SANDBOX_OWN_UID"


def own_uid(slot: int, owner_pid: int | None = None) -> int:
    """Return an unused uid: from the upper half of the ids in this namespace, by owner process and slot."""
    half = max(1, min(_mapped_ids(), 2**31) // 2)
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
    if not is_root():
        return False
    return succeeds_in_child(lambda: become(uid))


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


def _mapped_ids() -> int:
    """Return the largest uid of this user namespace plus one."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        return max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    except (OSError, ValueError):
        return 2**16
