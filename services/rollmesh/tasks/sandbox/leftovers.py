"""Cleanup of processes that code leaves behind on machines without process namespaces."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rollmesh.tasks.sandbox import kernel

_ROUNDS = 1000


@contextmanager
def cleared() -> Iterator[None]:
    """Kill and reap the processes that the code in the block leaves behind.

    This process adopts orphans only inside the block, because it would not reap later ones.
    """
    adopted_before = kernel.adopts_orphans()
    kernel.adopt_orphans()
    before = _children()
    try:
        yield
    finally:
        clear(before)
        kernel.adopt_orphans(adopted_before)


def clear(before: frozenset[int]) -> None:
    """Kill and reap every child that is not in ``before``, and then the children that these leave behind."""
    for _ in range(_ROUNDS):
        left = _children() - before
        if not left:
            return
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in left:
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children() -> frozenset[int]:
    pid = os.getpid()
    try:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii")
    except OSError:  # not Linux, or a kernel built without this list
        return frozenset()
    return frozenset(map(int, text.split()))
