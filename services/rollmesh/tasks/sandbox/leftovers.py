"""What code leaves running where the kernel does not end it all at once (no process namespace)."""

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
    """Kill and reap what code leaves that runs in the block: orphans come to this process, but not for longer.

    Nobody would wait for those that come later.
    """
    adopted_before = kernel.adopts_orphans()
    kernel.adopt_orphans()
    others = _children()
    try:
        yield
    finally:
        clear(others)
        kernel.adopt_orphans(adopted_before)


def clear(before: frozenset[int]) -> None:
    """Kill and reap every child that was not there ``before``; what they leave follows."""
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
