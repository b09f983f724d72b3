"""Empty chunks: of calls that have no token to send for a while, and of those that end without a further token.

A caller takes a generator that sends nothing for ``rollout.chunk_timeout_seconds`` for hung. A call may have nothing to
send for longer: it waits for a slot, it is held during a load, or its next chunk is long. Then an empty chunk follows
every few seconds, as long as the engine responds.

A caller takes an older version than that of its newest token, or than it asked for, for a fault. An engine may serve an
older one by the time that a call ends without a further token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from typing import Any

import numpy as np

from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import Chunk, GenerationCall

_LONGEST_INTERVAL_SECONDS = 5.0
_PER_TIMEOUT = 4


def empty_chunk_interval(chunk_timeout_seconds: float) -> float:
    """Return the seconds without a chunk after which an empty one is due."""
    return min(_LONGEST_INTERVAL_SECONDS, chunk_timeout_seconds / _PER_TIMEOUT)


async def with_empty_chunks(
    engine: Engine, call: GenerationCall, policy_version: int, interval_seconds: float
) -> AsyncGenerator[Chunk, None]:
    """Yield the chunks of a call, and an empty one after ``interval_seconds`` without one if the engine responds.

    Every chunk without a token, the engine's last one included, has the versions of the newest token, and before the
    first one ``policy_version``, the one in service when the call was accepted: they pass the caller's checks.
    """
    kv_min_version = policy_version
    async with aclosing(engine.generate(call)) as chunks:
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            try:
                while not (await asyncio.wait([coming], timeout=interval_seconds))[0]:
                    if await _responds(engine, coming):
                        yield Chunk(
                            token_ids=np.empty(0, np.int32),
                            behavior_logprobs=np.empty(0, np.float32),
                            policy_version=policy_version,
                            kv_min_version=kv_min_version,
                        )
            finally:
                await cancel_and_wait(coming)  # done or not: if this call is closed, nobody else reads its error
            chunk = coming.result()
            if chunk is None:
                return
            if len(chunk.token_ids):
                policy_version, kv_min_version = chunk.policy_version, chunk.kv_min_version
            else:
                chunk = replace(chunk, policy_version=policy_version, kv_min_version=kv_min_version)
            yield chunk


async def _responds(engine: Engine, coming: asyncio.Future[Chunk | None]) -> bool:
    """Wait until the engine responds or the next chunk arrives; return True in the first case."""
    response = asyncio.ensure_future(engine.respond())
    either: list[asyncio.Future[Any]] = [coming, response]
    try:
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    finally:
        (failure,) = await cancel_and_wait(response)
    return failure is None and not coming.done()  # the call itself gets the error of an engine that has failed
