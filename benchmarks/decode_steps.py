"""Decode steps of an engine at some numbers of running calls and some contexts: the points of a decode curve."""

import asyncio
import statistics
import time
from collections.abc import Sequence
from itertools import product

import numpy as np

from benchmarks.frame import Measure
from benchmarks.workloads import make_call
from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.sim.decode_curve import CurvePoint
from rollmesh.types import Int32Array

NEW_TOKENS = 128
"""Tokens that a call decodes beyond its context."""
_PREFILLS = 5


async def measure_points(
    engine: TorchEngine, ids: Int32Array, counts: Sequence[int], contexts: Sequence[int], *, rounds: int = 1
) -> tuple[CurvePoint, ...]:
    """Measure the seconds of a step for every number of calls and every context, repeating ``ids`` as far as needed.

    Each round measures every point; the smallest of the rounds counts, because other programs and the capture of CUDA
    graphs only add time. A point has the mean context of its steps.
    """
    measured: dict[tuple[int, int], CurvePoint] = {}
    for _, context, count in product(range(rounds), contexts, counts):
        point = await _measure_point(engine, count, np.resize(ids, context))
        before = measured.get((count, context), point)
        measured[count, context] = min(point, before, key=lambda each: each.seconds)
    return tuple(measured.values())


async def measure_prefill(engine: TorchEngine, ids: Int32Array, context: int) -> float:
    """Return the seconds per token of a prefill: a call of one token, on an idle engine, by its context."""
    taken = []
    for number in range(_PREFILLS):
        call = make_call(f"prefill-{number}", np.resize(np.roll(ids, number), context), 1, chunk_tokens=1)
        started = time.perf_counter()
        async for _ in engine.generate(call):
            pass
        taken.append(time.perf_counter() - started)
    return statistics.median(taken) / context


def step_measure(point: CurvePoint, mode: str = "") -> Measure:
    """Return the row of a point; ``mode`` names the engine's way to run steps."""
    name = f"decode step, {point.running} running of {point.context} tokens{mode and ', '}{mode}"
    return Measure(name=name, value=1000 * point.seconds, unit="ms")


async def _measure_point(engine: TorchEngine, count: int, context: Int32Array) -> CurvePoint:
    """Measure the mean step of calls that start and end together: they are submitted to a paused engine.

    The engine's own counters are compared before and after, because a busy event loop sees tokens late.
    """

    async def call(number: int) -> None:
        async for _ in engine.generate(make_call(f"curve-{number}", context, NEW_TOKENS, chunk_tokens=NEW_TOKENS)):
            pass

    before = engine.status()
    await engine.pause()
    tasks = [asyncio.create_task(call(number)) for number in range(count)]
    await asyncio.sleep(0)  # every task submits its call before the engine resumes
    await engine.resume()
    await asyncio.gather(*tasks)
    after = engine.status()
    steps = (after.decode_step_total or 0) - (before.decode_step_total or 0)
    seconds = (after.decode_seconds_total or 0.0) - (before.decode_seconds_total or 0.0)
    if not 0 < steps <= NEW_TOKENS:
        raise EngineError(
            f"{count} calls of {len(context)} tokens took {steps} steps instead of {NEW_TOKENS}: they did not run "
            "together; measure with a larger cache or fewer slots"
        )
    return CurvePoint(running=count, context=len(context) + steps // 2, seconds=seconds / steps)
