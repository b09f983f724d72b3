"""Waiting for a condition, with a deadline."""

import asyncio
import time


async def until(condition, seconds=60.0):
    """The first true result of ``condition``, called (and awaited) every 20 ms."""
    deadline = time.monotonic() + seconds
    while True:
        result = condition()
        result = await result if asyncio.iscoroutine(result) else result
        if result:
            return result
        assert time.monotonic() < deadline, f"still waiting after {seconds} s"
        await asyncio.sleep(0.02)
