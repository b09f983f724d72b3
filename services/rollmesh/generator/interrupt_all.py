"""Interruption of every call of a generator."""

from __future__ import annotations

import asyncio
import contextlib

from rollmesh.errors import RollmeshError
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.logging import get_logger

_STRAGGLER_SECONDS = 0.2


async def interrupt_all(engine: Engine, serving_state: ServingState) -> int:
    """End all calls as interrupted, including admitted calls that have not reached the engine yet.

    Admission must be closed before. Returns the number of calls ended.
    """
    count = 0
    while serving_state.call_count:
        try:
            count += await engine.interrupt()
        except RollmeshError as error:  # a failed engine has already sent the error to its callers
            get_logger("generator").warning("interrupt_failed", message=str(error))
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STRAGGLER_SECONDS):
                await serving_state.until_idle()
    return count
