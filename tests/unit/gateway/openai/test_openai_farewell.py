"""When calls under way are told that their gateway stops."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollmesh.errors import StoreUnavailable
from rollmesh.gateway.openai.farewell import farewell_at


async def _over() -> bool:
    return True


async def _going_on() -> bool:
    return False


async def _unknown() -> bool:
    raise StoreUnavailable("Redis has stopped first")


@pytest.mark.parametrize("complete", [_going_on, _unknown])
async def test_a_call_has_two_seconds_to_be_answered(complete) -> None:
    shutdown = asyncio.Event()
    async with farewell_at(shutdown, complete) as farewell:
        start = time.monotonic()
        shutdown.set()
        error = await farewell.heard()
    assert time.monotonic() - start > 1.9
    assert (error.status, error.code) == (503, "shutting_down")


async def test_a_run_that_needs_nothing_more_says_so_at_once() -> None:
    shutdown = asyncio.Event()
    async with farewell_at(shutdown, _over) as farewell:
        shutdown.set()
        error = await farewell.heard()
    assert (error.status, error.code) == (410, "run_complete")
