"""Importing much at once, and ending without tidying it away: seconds of every process with torch in it."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

_ours = False
"""Whether this process is a command of rollmesh: in somebody else's, what may be garbage is not ours to decide."""


def own_process() -> None:
    """Let this process no longer look for garbage in what it has imported, neither now and then nor when it ends.

    The last search, over everything, takes longer than all the rest of its end. Call first of all: what others
    register for the exit runs before, as ever.
    """
    global _ours
    _ours = True
    gc.freeze()
    atexit.register(gc.freeze)


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """For imports of thousands of modules: nobody looks for garbage in what they define meanwhile.

    In a process of our own nobody does later either. What else is alive by then is kept too, so modules that are there
    already freeze nothing.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if _ours and len(sys.modules) > modules:
            gc.freeze()
        if collects:
            gc.enable()
