"""Calls without a token to send for longer than the chunk timeout: the engine lives, or it does not."""

import asyncio
import gc
import threading
from typing import Any

import pytest

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.generation_service import with_empty_chunks
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import FinishReason, VersionNeed
from rollmesh.worker.active_trajectory import ActiveTrajectory

from ...kit.generation import VOCAB, collect, make_call
from ...kit.waiting import reached
from .served_engine import despite_stalls, served

LIMITS = {"vocab_size": VOCAB, "max_context_tokens": 256, "chunk_token_count": 60}
STEP_SECONDS = 0.05


async def test_a_call_that_waits_for_a_slot_or_has_a_long_chunk_is_not_given_up(engine_of):
    async def attempt(timeout: float) -> None:
        # Each call takes 1.5 times the chunk timeout, and the one that waits twice as long.
        engine = await engine_of(slots=1, pace=[[1, 1.5 * timeout / 60]])
        async with served(engine, **LIMITS, chunk_timeout_seconds=timeout) as generator:
            workers = [await generator.worker() for _ in range(2)]

            async def sample() -> list[tuple[ActiveTrajectory, FinishReason]]:
                async with asyncio.TaskGroup() as group:
                    first = group.create_task(workers[0].sample("t0", 60))
                    await reached(lambda: engine.status().running_count)  # before, a second call would be refused
                    second = group.create_task(workers[1].sample("t1", 60))
                return [first.result(), second.result()]

            found = await generator.unless_hung(sample())
        assert [(active.token_count, reason) for active, reason in found] == [(60, FinishReason.LENGTH)] * 2
        assert [w.ended("length") for w in workers] == [1, 1]
        assert engine.status().generated_token_total == 120

    await despite_stalls(attempt)


async def test_a_call_of_an_engine_that_hangs_is_given_up_after_the_chunk_timeout(engine_of):
    engine = await engine_of(slots=1)
    batch, go_on = engine._thread.batch, threading.Event()
    step = batch.step

    def hanging_step() -> None:
        go_on.wait()
        step()

    batch.step = hanging_step
    async with served(engine, **LIMITS, chunk_timeout_seconds=0.5) as generator:
        worker = await generator.worker()
        sampling = asyncio.create_task(worker.sample("t", 60))
        try:
            await reached(lambda: worker.ended("hung"))
        finally:
            await cancel_and_wait(sampling)
            go_on.set()


async def test_an_empty_chunk_has_the_version_that_the_call_accepts_and_a_refusal_after_it_is_still_one(
    engine_of, model_folder
):
    engine = await engine_of(slots=1, pace=[[1, STEP_SECONDS]])
    async with served(engine, **LIMITS, chunk_timeout_seconds=0.5) as generator:
        running = asyncio.create_task(collect(engine, make_call("running", max_new_token_count=240)))
        await reached(lambda: engine.status().running_count)
        waiting = generator.client.generate(generator.record, make_call("waiting"), VersionNeed(pinned_version=0))
        empty = await anext(waiting)
        assert (len(empty.token_ids), empty.finish_reason) == (0, None)
        assert (empty.policy_version, empty.kv_min_version) == (0, 0)
        await engine.load(model_folder("qwen2", seed=1), 1, OnNewVersion.INTERRUPT)
        assert (await running).reason is FinishReason.INTERRUPTED
        with pytest.raises(GenerationRefused, match="policy version 1 was put in service while the call waited"):
            async for chunk in waiting:
                assert not len(chunk.token_ids)


async def test_a_call_that_ends_without_a_token_ends_under_the_version_that_it_was_accepted_at(engine_of, model_folder):
    engine = await engine_of(seed=1, version=1, slots=1)
    await engine.pause()
    stream = with_empty_chunks(engine, make_call("waiting"), 1, interval_seconds=0.01)
    chunks = [await anext(stream)]
    await engine.load(model_folder("qwen2"), 0, OnNewVersion.INTERRUPT)
    await engine.interrupt()
    chunks += [chunk async for chunk in stream]
    assert chunks[-1].finish_reason is FinishReason.INTERRUPTED
    # The caller takes an older version than it asked for for a fault.
    assert {(len(chunk.token_ids), chunk.policy_version, chunk.kv_min_version) for chunk in chunks} == {(0, 1, 1)}


async def test_the_error_of_a_call_that_is_closed_after_an_empty_chunk_is_not_logged_as_unread(engine_of):
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: unread.append(context))
    engine = await engine_of(slots=1)
    await engine.pause()
    stream = with_empty_chunks(engine, make_call("left"), 0, interval_seconds=0.01)
    assert not len((await anext(stream)).token_ids)
    other = asyncio.create_task(collect(engine, make_call("other")))
    await engine.respond()

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine._thread.post(fail)
    with pytest.raises(EngineError, match="out of memory"):
        await other  # the first call has the error by then
    await stream.aclose()
    gc.collect()
    assert unread == []
