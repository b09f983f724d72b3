"""When calls under way are told that their gateway stops."""

from __future__ import annotations

import asyncio
import time

import pytest

from rollmesh.agents import agents_service
from rollmesh.agents.agents_service import drain_at
from rollmesh.errors import StoreUnavailable


async def _over() -> bool:
    return True


async def _going_on() -> bool:
    return False


async def _unknown() -> bool:
    raise StoreUnavailable("Redis has stopped first")


@pytest.mark.parametrize("complete", [_going_on, _unknown])
async def test_a_call_has_the_stated_time_to_be_answered(complete, monkeypatch) -> None:
    assert agents_service._ANSWER_SECONDS == 2.0
    monkeypatch.setattr(agents_service, "_ANSWER_SECONDS", 0.2)
    shutdown = asyncio.Event()
    async with drain_at(shutdown, complete) as notice:
        start = time.monotonic()
        shutdown.set()
        error = await notice.wait()
    assert time.monotonic() - start > 0.19
    assert (error.status, error.code) == (503, "shutting_down")


async def test_a_run_that_needs_nothing_more_says_so_at_once() -> None:
    shutdown = asyncio.Event()
    async with drain_at(shutdown, _over) as notice:
        shutdown.set()
        error = await notice.wait()
    assert (error.status, error.code) == (410, "run_complete")
