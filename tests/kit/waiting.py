"""Waits for events, with a deadline that says what did not happen."""

import asyncio
import inspect
import time
from collections.abc import Callable
from typing import Any

import pytest

SECONDS = 300.0
"""Seconds for what takes seconds on an idle machine: it may be shared, and three times slower."""


def until(
    condition: Callable[[], object],
    what: str | Callable[[], str],
    seconds: float = SECONDS,
    *,
    check: Callable[[], object] = lambda: None,
    pause: float = 0.05,
) -> None:
    """Poll a condition until it holds; ``check`` ends the wait by an error, for example when a process has ended."""
    deadline = time.monotonic() + seconds
    while not condition():
        check()
        if time.monotonic() > deadline:
            pytest.fail(_missed(what, seconds))
        time.sleep(pause)


async def reached(
    condition: Callable[[], Any],
    what: str | Callable[[], str] = "the condition",
    seconds: float = SECONDS,
    *,
    check: Callable[[], object] = lambda: None,
    pause: float = 0.002,
) -> Any:
    """The first true result of ``condition``, called and where it is a coroutine awaited; ``check`` as in ``until``."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        if inspect.isawaitable(result):
            result = await result
        if result:
            return result
        check()
        if time.monotonic() > deadline:
            pytest.fail(_missed(what, seconds))
        await asyncio.sleep(pause)


def _missed(what: str | Callable[[], str], seconds: float) -> str:
    return f"waited {seconds:g} s for {what if isinstance(what, str) else what()}"
