"""Calls of the torch engine whose callers are behind with saving: held in their slots, without a step, for a time."""

from __future__ import annotations

import asyncio
import random

import numpy as np
import pytest

from rollmesh.generator.engines import call_limits
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import FinishReason, GenerationCall, Int32Array

from ...kit.generation import Running, collect, make_call, prompt_ids
from ...kit.waiting import reached

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

    async def held(self) -> Reader:
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
