"""Step-time curve of decode: seconds per step by number of running calls, in the format of ``generator.pace``."""

from __future__ import annotations

import asyncio
import statistics
import time
from itertools import pairwise

from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import GenerationCall, Int32Array, SamplingParams

Curve = list[tuple[int, float]]

_CHUNK = 16
_CHUNKS = 8
_WARM_CHUNKS = 2
"""Uncounted chunks at the start, while kernels are loaded and graphs are captured."""


def running_counts(slots: int) -> list[int]:
    """Return the powers of two below ``slots``, and ``slots``."""
    counts = []
    count = 1
    while count < slots:
        counts.append(count)
        count *= 2
    return [*counts, slots]


async def step_time_curve(engine: TorchEngine, counts: list[int], context: Int32Array) -> Curve:
    """Measure the median seconds of a decode step of an idle engine for each number of calls after ``context``."""
    return [(count, await _step_seconds(engine, count, context)) for count in counts]


async def _step_seconds(engine: TorchEngine, count: int, context: Int32Array) -> float:
    """Measure one point; calls are submitted to a paused engine, so they start and return chunks together."""
    arrivals: list[float] = []

    async def call(number: int) -> None:
        request = GenerationCall(
            trajectory_id=f"curve-{number}",
            context_ids=context,
            prompt_token_count=len(context),
            max_new_token_count=_CHUNK * _CHUNKS,
            sampling=SamplingParams(),
            chunk_token_count=_CHUNK,
        )
        async for chunk in engine.generate(request):
            if number == 0 and len(chunk.token_ids) == _CHUNK:
                arrivals.append(time.perf_counter())

    await engine.pause()
    tasks = [asyncio.create_task(call(number)) for number in range(count)]
    await asyncio.sleep(0)  # every task submits its call before the engine resumes
    await engine.resume()
    await asyncio.gather(*tasks)
    between = [later - earlier for earlier, later in pairwise(arrivals)]
    return statistics.median(between[_WARM_CHUNKS - 1 :]) / _CHUNK
