"""Process lifecycle: imports, one main coroutine, and a shutdown event that SIGTERM or SIGINT sets."""

import asyncio
import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator

import psutil

from rollmesh.errors import RollmeshError, Unfinished
from rollmesh.runtime.logging import get_logger

Shutdown = asyncio.Event
"""Event that is set when the process should drain and return."""

FAILURE_EVENT = "service_failed"
"""Last log line of a process that ended with a RollmeshError: ``error`` and ``message`` have the reason; ``passing`` is
true when a later start may succeed."""

EXIT_CONFIG = 78
"""Exit status of a process that requires an operator (EX_CONFIG of sysexits.h); a restart fails again."""

EXIT_UNFINISHED = 128 + signal.SIGTERM
"""Exit status of a process that a signal ended before its work was complete; a restart continues."""


def run_service(main: Callable[[Shutdown], Awaitable[None]], *, grace_seconds: float = 30.0) -> int:
    """Run ``main(shutdown)`` to its end and return the exit status.

    The first signal sets ``shutdown``; ``main`` then has ``grace_seconds`` to drain before it is cancelled. A second
    signal cancels it immediately. A RollmeshError is logged as one line and gives status 1, or ``EXIT_CONFIG`` if it is
    final, or ``EXIT_UNFINISHED`` if it is Unfinished. Any other error propagates with its traceback.
    """
    if sys.platform == "win32":
        return asyncio.run(_supervised(main, grace_seconds))
    import uvloop

    return uvloop.run(_supervised(main, grace_seconds))


async def _supervised(main: Callable[[Shutdown], Awaitable[None]], grace_seconds: float) -> int:
    log = get_logger("lifecycle")
    shutdown = asyncio.Event()
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(main(shutdown))

    def on_signal(name: str) -> None:
        if shutdown.is_set():
            log.warning("second_signal_cancels", signal=name)
            task.cancel()
            return
        log.info("shutdown_requested", signal=name, grace_seconds=grace_seconds)
        shutdown.set()
        loop.call_later(grace_seconds, task.cancel)

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        await task
    except asyncio.CancelledError:
        log.warning("cancelled_after_grace", grace_seconds=grace_seconds)
        return 1
    except RollmeshError as error:
        return log_failure(error)
    return 0


def log_failure(error: RollmeshError) -> int:
    """Log the error that ended the process as one line; returns the exit status."""
    log = get_logger("lifecycle")
    if isinstance(error, Unfinished):
        log.info("ended_unfinished", message=str(error))
        return EXIT_UNFINISHED
    log.error(FAILURE_EVENT, error=type(error).__name__, message=str(error), passing=error.passing)
    return EXIT_CONFIG if error.final else 1


async def wait_or_shutdown(shutdown: Shutdown, seconds: float) -> bool:
    """Sleep up to ``seconds``; returns True immediately when shutdown is requested."""
    # asyncio.timeout, not wait_for: on Python 3.11 wait_for may swallow a cancellation that coincides with the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await shutdown.wait()
    return shutdown.is_set()


def die_with_parent(launcher: int) -> None:
    """Make the kernel terminate this process when its parent dies (Linux), so a killed launcher leaves no orphan.

    ``launcher`` is the process id of the launcher, which may have started this process through another one (torchrun).
    If it died before this call, it is missing among the ancestors. A parent with id 1 does not prove that: process 1
    adopts orphans, but it may also be the launcher of a container.
    """
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if launcher not in (ancestor.pid for ancestor in psutil.Process().parents()):
        os.kill(os.getpid(), signal.SIGTERM)


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
