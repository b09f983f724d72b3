"""One process, one main coroutine, one way to stop: SIGTERM or SIGINT set the shutdown event."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import psutil

from rollmesh.errors import RollmeshError
from rollmesh.runtime.logging import get_logger

Shutdown = asyncio.Event
"""Set once the process should drain and return."""

FAILURE_EVENT = "service_failed"
"""The last line in the log of a process that ended with a RollmeshError: ``error`` and ``message`` say why, ``passing``
whether a later start may succeed."""

EXIT_CONFIG = 78
"""Exit status of a process that a person must help (EX_CONFIG of sysexits.h): starting it again changes nothing."""


def run_service(main: Callable[[Shutdown], Awaitable[None]], *, grace_seconds: float = 30.0) -> int:
    """Run ``main(shutdown)`` to its end and return the exit status.

    The first signal sets ``shutdown``; ``main`` then has ``grace_seconds`` to drain before it is cancelled; a second
    signal cancels at once. A RollmeshError is logged as one line and gives status 1, or ``EXIT_CONFIG`` if it is final;
    any other error keeps its trace.
    """
    return _runner(_supervised(main, grace_seconds))


def _runner(coroutine: Coroutine[Any, Any, int]) -> int:
    if sys.platform == "win32":
        return asyncio.run(coroutine)
    import uvloop

    return uvloop.run(coroutine)


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
    """Log what ended the process as one line; returns its exit status."""
    log = get_logger("lifecycle")
    log.error(FAILURE_EVENT, error=type(error).__name__, message=str(error), passing=error.passing)
    return EXIT_CONFIG if error.final else 1


async def wait_or_shutdown(shutdown: Shutdown, seconds: float) -> bool:
    """Sleep up to ``seconds``; returns True at once when shutdown is requested."""
    # asyncio.timeout, not wait_for: on Python 3.11 the latter may swallow a cancellation that meets the event.
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            await shutdown.wait()
    return shutdown.is_set()


def die_with_parent(launcher: int) -> None:
    """Ask the kernel to end this process when its parent dies (Linux), so a killed launcher leaves no orphan.

    ``launcher`` is the process that started this one, perhaps through another (torchrun). Whether it died before the
    kernel was asked is seen by its absence among the ancestors: process 1 may be an orphan's new parent, and may be
    the launcher of a container.
    """
    if sys.platform != "linux":
        return
    import ctypes

    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGTERM)
    if launcher not in (ancestor.pid for ancestor in psutil.Process().parents()):
        os.kill(os.getpid(), signal.SIGTERM)
