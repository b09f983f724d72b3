"""Ending every call of a generator with the tokens that it has."""

from __future__ import annotations

import asyncio
import contextlib

from rollmesh.errors import RollmeshError
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.logging import get_logger

_STRAGGLER_SECONDS = 0.2


async def interrupt_all(engine: Engine, rotation: ServingState) -> int:
    """End all calls as interrupted, those too that were admitted a moment ago and had not reached the engine.

    The rotation must take no new calls. Returns how many calls were ended.
    """
    count = 0
    while rotation.call_count:
        try:
            count += await engine.interrupt()
        except RollmeshError as error:  # a failed engine has told its callers already
            get_logger("generator").warning("interrupt_failed", message=str(error))
            break
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_STRAGGLER_SECONDS):
                await rotation.until_idle()
    return count
