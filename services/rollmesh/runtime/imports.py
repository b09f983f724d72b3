"""Garbage collector settings for large imports, which save seconds at startup and exit of a process with torch."""

from __future__ import annotations

import atexit
import contextlib
import gc
import sys
from collections.abc import Iterator

_is_own_process = False
"""True in a process of a rollmesh command; other processes keep their garbage collection unchanged."""


def own_process() -> None:
    """Freeze the garbage collector for everything imported so far; scanning it at exit costs seconds.

    The scan at exit takes longer than the rest of the exit. Call this function first, so that all other exit handlers
    run before its own.
    """
    global _is_own_process
    _is_own_process = True
    gc.freeze()
    atexit.register(gc.freeze)


@contextlib.contextmanager
def many_imports() -> Iterator[None]:
    """Disable garbage collection during imports of thousands of modules.

    In a process of rollmesh, also freeze all live objects after new imports, so that they are never scanned. Nothing is
    frozen when every module was imported before.
    """
    collects, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if _is_own_process and len(sys.modules) > modules:
            gc.freeze()
        if collects:
            gc.enable()
