"""Uids of our own, so that limits count and signals reach only what is ours. Needs root."""

from __future__ import annotations

import os
from pathlib import Path

from rollmesh.tasks.sandbox import kernel

SLOTS_PER_PROCESS = 256
"""Uids that one process can tell apart."""


def own_uid(slot: int, owner_pid: int | None = None) -> int:
    """A uid that nothing else uses: from the upper half of the ids that exist here, by owner process and slot."""
    half = min(_mapped_ids(), 2**31) // 2
    pid = os.getpid() if owner_pid is None else owner_pid
    return half + (pid * SLOTS_PER_PROCESS + slot % SLOTS_PER_PROCESS) % half


def become(uid: int) -> None:
    """Turn this process into ``uid`` for good, with no groups and no way back; needs root."""
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
    kernel.refuse_new_privileges()


def is_root() -> bool:
    """Whether this process may change its uid (as far as the uid says)."""
    return os.geteuid() == 0


def _mapped_ids() -> int:
    """One more than the largest uid of this user namespace."""
    try:
        lines = Path("/proc/self/uid_map").read_text(encoding="ascii").splitlines()
        return max(int(first) + int(count) for first, _, count in (line.split() for line in lines))
    except (OSError, ValueError):
        return 2**16
