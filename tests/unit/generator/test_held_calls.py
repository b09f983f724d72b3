"""Calls that wait: held for callers behind with saving, or without a token for longer than the chunk timeout."""

import asyncio
import gc
import random
import threading
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import EngineError, GenerationRefused
from rollmesh.generator.engines import call_limits
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.generator.generation_service import with_empty_chunks
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import FinishReason, GenerationCall, Int32Array, VersionNeed
from rollmesh.worker.active_trajectory import ActiveTrajectory

from ...kit.generation import VOCAB, Running, collect, make_call, prompt_ids
from ...kit.waiting import reached
from .served_engine import despite_stalls, served

LIMIT, CHUNK = 16, 8


@pytest.fixture
def _long_holds(monkeypatch):
    """Holds that outlast every delay of a busy machine."""
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", 600.0)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", 600.0)


class Reader(Running):
    """Reads a call's chunks and acknowledges only what it is told to."""

    def __init__(self, engine: TorchEngine, call: GenerationCall) -> None:
        super().__init__(engine, [call])
        self.engine, (self.rollout,), (self.task,) = engine, self.rollouts, self.tasks

    def acknowledge(self) -> None:
        self.engine.acknowledge({self.rollout.call.trajectory_id: len(self.rollout.ids)})

    async def held(self) -> "Reader":
        """Wait until the call may not sample another chunk; chunks are aligned over all calls: one may be short."""
        await reached(lambda: len(self.rollout.tokens) > LIMIT - CHUNK)
        return self

    async def reason(self) -> FinishReason | None:
        (rollout,) = await self.end()
        return rollout.reason


def limited(name: str, context: Int32Array | None = None, **changes: object) -> GenerationCall:
    return make_call(name, context, unacknowledged_token_limit=LIMIT, chunk_token_count=CHUNK, **changes)


@pytest.mark.usefixtures("_long_holds")
@pytest.mark.parametrize("graphs", [False, True], ids=["plain", "padded"])
@pytest.mark.parametrize("seed", range(3))
async def test_whenever_saves_are_acknowledged_the_tokens_are_the_same_and_none_beyond_the_limit(
    engine_of, graphs, seed
):
    rng = random.Random(seed)
    engine = await engine_of(slots=5, max_context_tokens=400, cuda_graphs=graphs)
    calls = [
        make_call(
            f"t{i}",
            prompt_ids(i, rng.randint(1, 60)),
            max_new_token_count=rng.randint(1, 60),
            chunk_token_count=(chunk := rng.randint(1, 20)),
            unacknowledged_token_limit=rng.choice([0, chunk, chunk + 5, 2 * chunk]),
        )
        for i in range(9)
    ]
    free = [make_call(c.trajectory_id, c.context_ids, max_new_token_count=c.max_new_token_count) for c in calls]
    whole = await asyncio.gather(*(collect(engine, call) for call in free))

    async def read(call: GenerationCall) -> Int32Array:
        parts, durable = [], 0
        async for chunk in engine.generate(call):
            parts.append(chunk.token_ids)
            count = sum(map(len, parts))
            assert not call.unacknowledged_token_limit or count - durable <= call.unacknowledged_token_limit
            await asyncio.sleep(rng.choice([0, 0, 0.0002, 0.005]))
            durable = count
            engine.acknowledge({call.trajectory_id: len(call.context_ids) + durable})
        assert chunk.finish_reason is FinishReason.LENGTH
        return np.concatenate(parts)

    async with asyncio.timeout(60):
        found = await asyncio.gather(*(read(call) for call in calls))
    for one, other in zip(whole, found, strict=True):
        np.testing.assert_array_equal(one.tokens, other)
    assert engine.status().held_back_total > 0
    assert engine.status().reprefill_token_total == 0


@pytest.mark.usefixtures("_long_holds")
async def test_a_held_call_obeys_an_interrupt_and_frees_its_slot_when_its_caller_hangs_up(engine_of):
    engine = await engine_of(slots=2)
    held = [await Reader(engine, limited(f"h{i}")).held() for i in range(2)]
    assert await engine.interrupt(["h0"]) == 1
    assert await held[0].reason() is FinishReason.INTERRUPTED
    assert len(held[0].rollout.tokens) <= LIMIT
    held[1].task.cancel()
    assert (await collect(engine, make_call("next"))).reason is FinishReason.LENGTH
    status = engine.status()
    assert (status.running_count, status.kv_tokens_used) == (0, 0)


async def test_a_call_that_is_never_acknowledged_ends_although_no_other_call_waits(engine_of, monkeypatch):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", 0.05)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", 600.0)
    engine = await engine_of(slots=1)
    held = await Reader(engine, limited("h")).held()
    assert await held.reason() is FinishReason.INTERRUPTED
    assert engine.status().kv_tokens_used == 0


@pytest.mark.usefixtures("_long_holds")
async def test_a_held_call_gives_its_cache_to_a_running_one(engine_of):
    engine = await engine_of(slots=4, kv_token_capacity=400)
    # Nothing but short answers so far: admission expects too little of what comes.
    await asyncio.gather(*(collect(engine, make_call(f"s{i}", max_new_token_count=LIMIT)) for i in range(8)))
    held = [await Reader(engine, limited(f"h{i}", prompt_ids(i, 60), max_new_token_count=80)).held() for i in range(2)]
    running = await collect(engine, make_call("r", prompt_ids(5, 20), max_new_token_count=230))
    assert (running.reason, len(running.tokens)) == (FinishReason.LENGTH, 230)
    async with asyncio.timeout(60):  # on a busy loop the running call may be read to its end first
        await asyncio.wait([reader.task for reader in held], return_when=asyncio.FIRST_COMPLETED)
    ended = [reader for reader in held if reader.task.done()]
    assert ended and all(reader.rollout.reason is FinishReason.INTERRUPTED for reader in ended)
    assert engine.status().reprefill_token_total == 0


@pytest.mark.usefixtures("_long_holds")
async def test_a_held_call_keeps_its_cache_through_a_keep_kv_load_and_ends_when_the_version_falls(
    engine_of, model_folder
):
    engine = await engine_of(version=4)
    held = await Reader(engine, limited("h", max_new_token_count=3 * LIMIT)).held()
    await engine.load(model_folder("qwen2", seed=1), 5, OnNewVersion.KEEP_KV)
    held.acknowledge()
    await reached(lambda: len(held.rollout.tokens) == 2 * LIMIT)
    assert [(c.policy_version, c.kv_min_version) for c in held.rollout.chunks] == [(4, 4)] * 2 + [(5, 4)] * 2
    await engine.load(model_folder("qwen2"), 4, OnNewVersion.KEEP_KV)
    assert await held.reason() is FinishReason.INTERRUPTED
    assert len(held.rollout.tokens) == 2 * LIMIT


@pytest.mark.parametrize("acknowledged", [True, False])
async def test_a_drain_waits_for_a_held_call_but_not_for_ever(engine_of, model_folder, monkeypatch, acknowledged):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", 600.0)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", 600.0 if acknowledged else 0.05)
    engine = await engine_of()
    folder = model_folder("qwen2", seed=1)
    await engine.stage(folder, 1)
    held = await Reader(engine, limited("h", max_new_token_count=LIMIT + 8)).held()
    load = asyncio.create_task(engine.load(folder, 1, OnNewVersion.DRAIN))
    waiting = asyncio.create_task(collect(engine, make_call("w")))
    if acknowledged:
        await engine.interrupt(["of no call"])  # the load has been asked for by then
        assert not load.done()
        held.acknowledge()
    assert await held.reason() is (FinishReason.LENGTH if acknowledged else FinishReason.INTERRUPTED)
    assert set(held.rollout.versions) == {0}
    async with asyncio.timeout(60):
        await load
        assert set((await waiting).versions) == {1}


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
