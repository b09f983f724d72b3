"""Calls, interrupts, loads, pressure and errors of the torch engine."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import Callable

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rollmesh.errors import ConfigError, DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.generator.engines.torch.torch_options import TorchEngineOptions
from rollmesh.types import FinishReason

from .conftest import VOCAB, Rollout, collect, hf_logprobs, make_call, prompt_ids


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


def generated(engine: TorchEngine) -> int:
    return engine.status().generated_token_total


def slow_steps(engine: TorchEngine, when: Callable[[], bool]) -> threading.Event:
    """While ``when()`` holds, every step takes long until the event is set: a test that is late still meets its calls.

    Without it these calls need 50 ms for all of their tokens, which is less than a busy machine may hold up a test.
    """
    batch, at_full_speed = engine._thread.batch, threading.Event()
    step = batch.step

    def slow_step() -> None:
        step()
        if when():
            at_full_speed.wait(0.02)

    batch.step = slow_step
    return at_full_speed


class CallsUnderWay(list[asyncio.Task[Rollout]]):
    """Calls that each have a few tokens and get the others slowly until ``hurry``."""

    def __init__(self, tasks: list[asyncio.Task[Rollout]], at_full_speed: threading.Event) -> None:
        super().__init__(tasks)
        self.hurry = at_full_speed.set


async def start_calls(engine: TorchEngine, count: int) -> CallsUnderWay:
    calls = [make_call(f"t{i}", prompt_ids(i, 8), max_new_token_count=240) for i in range(count)]
    enough = generated(engine) + 5 * count
    at_full_speed = slow_steps(engine, lambda: generated(engine) > enough)
    tasks = [asyncio.create_task(collect(engine, call)) for call in calls]
    await until(lambda: engine.status().running_count == count and generated(engine) > enough)
    together = generated(engine)  # one of them may have been first
    await until(lambda: generated(engine) > together + 2 * count)
    return CallsUnderWay(tasks, at_full_speed)


async def test_a_stop_token_ends_the_call_and_is_its_last_token(engine_of):
    engine = await engine_of()
    free = await collect(engine, make_call(max_new_token_count=30))
    stop = int(free.tokens[17])
    first = int(np.flatnonzero(free.tokens == stop)[0])
    stopped = await collect(engine, make_call(max_new_token_count=30, stop_token_ids=(60, stop)))
    assert stopped.reason is FinishReason.STOP
    np.testing.assert_array_equal(stopped.tokens, free.tokens[: first + 1])


async def test_budget_and_context_length_end_a_call_with_length(engine_of):
    engine = await engine_of(max_context_tokens=64)
    short = await collect(engine, make_call(max_new_token_count=5))
    full = await collect(engine, make_call(context=prompt_ids(0, 50), max_new_token_count=100))
    assert (short.reason, len(short.tokens)) == (FinishReason.LENGTH, 5)
    assert (full.reason, len(full.tokens)) == (FinishReason.LENGTH, 14)
    one_token_context = await collect(engine, make_call(context=prompt_ids(0, 1), max_new_token_count=3))
    assert len(one_token_context.tokens) == 3


async def test_chunks_are_never_longer_than_asked_and_only_the_last_has_a_reason(engine_of):
    engine = await engine_of()
    rollout = await collect(engine, make_call(max_new_token_count=50, chunk_token_count=7))
    assert all(1 <= len(c.token_ids) <= 7 for c in rollout.chunks[:-1])
    assert [c.finish_reason for c in rollout.chunks[:-1]] == [None] * (len(rollout.chunks) - 1)
    assert sum(len(c.token_ids) for c in rollout.chunks) == 50


async def test_chunks_longer_than_the_ring_of_undelivered_tokens_are_split(engine_of):
    engine = await engine_of(max_context_tokens=512)
    rollout = await collect(engine, make_call(max_new_token_count=400, chunk_token_count=1000))
    assert len(rollout.tokens) == 400
    again = await collect(engine, make_call(max_new_token_count=400, chunk_token_count=3))
    np.testing.assert_array_equal(rollout.tokens, again.tokens)


async def test_more_calls_than_slots_all_finish(engine_of):
    engine = await engine_of(slots=3)
    calls = [make_call(f"t{i}", prompt_ids(i, 4 + i), max_new_token_count=10 + 5 * i) for i in range(20)]
    rollouts = await asyncio.gather(*(collect(engine, c) for c in calls))
    assert [len(r.tokens) for r in rollouts] == [10 + 5 * i for i in range(20)]
    status = engine.status()
    assert (status.running_count, status.waiting_count, status.kv_tokens_used) == (0, 0, 0)
    assert status.generated_token_total == sum(10 + 5 * i for i in range(20))


async def test_interrupt_ends_named_calls_with_the_tokens_they_have(engine_of):
    engine = await engine_of()
    tasks = await start_calls(engine, 3)
    assert await engine.interrupt(["t1", "unknown"]) == 1
    ended = await tasks[1]
    assert ended.reason is FinishReason.INTERRUPTED
    assert 0 < len(ended.tokens) < 240
    tasks.hurry()
    whole = await collect(engine, make_call("t1", prompt_ids(1, 8), max_new_token_count=240))
    np.testing.assert_array_equal(ended.tokens, whole.tokens[: len(ended.tokens)])
    assert (await tasks[0]).reason is FinishReason.LENGTH
    assert (await tasks[2]).reason is FinishReason.LENGTH


async def test_interrupting_all_ends_waiting_calls_too(engine_of):
    engine = await engine_of(slots=1)
    running = (await start_calls(engine, 1))[0]
    waiting = asyncio.create_task(collect(engine, make_call("waiting")))
    await until(lambda: engine.status().waiting_count == 1)
    assert await engine.interrupt() == 2
    assert (await running).reason is FinishReason.INTERRUPTED
    assert ((await waiting).reason, len((await waiting).tokens)) == (FinishReason.INTERRUPTED, 0)


async def test_closing_a_stream_early_frees_its_slot(engine_of):
    engine = await engine_of(slots=1)
    stream = engine.generate(make_call("left", max_new_token_count=240))
    await anext(stream)
    await stream.aclose()
    at_full_speed = slow_steps(engine, lambda: True)
    task = asyncio.create_task(collect(engine, make_call("cancelled", max_new_token_count=240)))
    await until(lambda: engine.status().running_count == 1)
    task.cancel()
    await until(lambda: engine.status().running_count == 0)
    assert generated(engine) < 2 * 240, "it was dropped, not finished"
    at_full_speed.set()
    assert len((await collect(engine, make_call("next"))).tokens) == 40


async def test_pause_holds_running_calls_and_resume_continues_them(engine_of):
    engine = await engine_of()
    tasks = await start_calls(engine, 2)
    await engine.pause()
    assert engine.status().paused
    held = engine.status()
    late = asyncio.create_task(collect(engine, make_call("late")))
    await engine.score([prompt_ids(0)])
    await until(lambda: engine.status().waiting_count == 1)
    assert engine.status().decode_step_total == held.decode_step_total
    assert engine.status().running_count == 2
    tasks.hurry()
    await engine.resume()
    assert {len((await t).tokens) for t in tasks} == {240}
    assert len((await late).tokens) == 40


async def test_load_in_interrupt_mode_ends_running_calls_and_later_ones_are_of_the_new_version(engine_of, model_folder):
    engine = await engine_of(version=4)
    tasks = await start_calls(engine, 3)
    pause_seconds = await engine.load(model_folder("qwen2", seed=1), 5, OnNewVersion.INTERRUPT)
    assert 0 <= pause_seconds < 5
    for task in tasks:
        rollout = await task
        assert rollout.reason is FinishReason.INTERRUPTED
        assert {(c.policy_version, c.kv_min_version) for c in rollout.chunks} == {(4, 4)}
    call = make_call("new", max_new_token_count=30)
    fresh = await collect(engine, call)
    assert {(c.policy_version, c.kv_min_version) for c in fresh.chunks} == {(5, 5)}
    wanted = hf_logprobs(model_folder("qwen2", seed=1), np.concatenate((call.context_ids, fresh.tokens)))
    np.testing.assert_allclose(fresh.logprobs, wanted[len(call.context_ids) - 1 :], atol=1e-4)


async def test_load_with_kept_kv_splits_chunks_at_the_swap_and_stamps_the_oldest_cache(engine_of, model_folder):
    engine = await engine_of(version=4)
    before = await collect(engine, make_call("t0", prompt_ids(0, 8), max_new_token_count=240))
    tasks = await start_calls(engine, 3)
    await engine.load(model_folder("qwen2", seed=1), 5, OnNewVersion.KEEP_KV)
    await until(lambda: engine.status().policy_version == 5)
    at_swap = generated(engine)
    await until(lambda: generated(engine) > at_swap + 9)
    await engine.load(model_folder("qwen2", seed=2), 6, OnNewVersion.KEEP_KV)
    tasks.hurry()
    rollouts = [await t for t in tasks]
    for rollout in rollouts:
        versions = [c.policy_version for c in rollout.chunks]
        assert versions == sorted(versions) and {4, 5, 6} == set(versions)
        assert {c.kv_min_version for c in rollout.chunks} == {4}
        assert len(rollout.tokens) == 240
    pure = sum(len(c.token_ids) for c in rollouts[0].chunks if c.policy_version == 4)
    np.testing.assert_array_equal(rollouts[0].tokens[:pure], before.tokens[:pure])
    assert (rollouts[0].tokens[pure:] != before.tokens[pure:]).any()


async def test_drain_swaps_after_the_running_calls_and_before_the_waiting_ones(engine_of, model_folder):
    engine = await engine_of(slots=2, version=4)
    folder = model_folder("qwen2", seed=1)
    await engine.stage(folder)  # so that the load is asked for before the calls that wait
    tasks = await start_calls(engine, 2)
    load = asyncio.create_task(engine.load(folder, 5, OnNewVersion.DRAIN))
    waiting = [asyncio.create_task(collect(engine, make_call(f"w{i}"))) for i in range(3)]
    await until(lambda: engine.status().waiting_count == 3)
    tasks.hurry()
    await load
    for task in tasks:
        assert {c.policy_version for c in (await task).chunks} == {4}
        assert (await task).reason is FinishReason.LENGTH
    for task in waiting:
        assert {(c.policy_version, c.kv_min_version) for c in (await task).chunks} == {(5, 5)}


async def test_concurrent_loads_follow_each_other_in_order(engine_of, model_folder):
    engine = await engine_of()
    (await start_calls(engine, 2)).hurry()
    modes = (OnNewVersion.KEEP_KV, OnNewVersion.DRAIN, OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV)
    loads = [engine.load(model_folder("qwen2", seed=i % 3), i, mode) for i, mode in enumerate(modes, start=1)]
    await asyncio.gather(*loads)
    assert engine.status().policy_version == 4
    scores = (await engine.score([prompt_ids(0, 30)]))[0]
    np.testing.assert_allclose(scores, hf_logprobs(model_folder("qwen2", seed=1), prompt_ids(0, 30)), atol=1e-4)


async def test_a_staged_policy_is_swapped_without_being_read_again(engine_of, model_folder, tmp_path):
    engine = await engine_of()
    folder = tmp_path / "policy"
    shutil.copytree(model_folder("qwen2", seed=1), folder)
    await engine.stage(folder)
    shutil.rmtree(folder)
    await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    scores = (await engine.score([prompt_ids(0, 30)]))[0]
    np.testing.assert_allclose(scores, hf_logprobs(model_folder("qwen2", seed=1), prompt_ids(0, 30)), atol=1e-4)
    with pytest.raises(EngineError, match=r"config\.json"):
        await engine.load(folder, 2, OnNewVersion.INTERRUPT)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c, _: c.update(hidden_size=96), "hidden_size is 96, the running policy has 48"),
        (lambda c, _: c.update(vocab_size=62), "vocab_size is 62, the running policy has 61"),
        (lambda c, _: c.update(model_type="gpt2"), "model_type='gpt2'"),
        (lambda c, _: c.update(use_sliding_window=True), "use_sliding_window"),
        (lambda _, t: t.pop("model.norm.weight"), "model.norm.weight"),
        (lambda _, t: t.update({"model.norm.weight": t["model.norm.weight"][:-1].clone()}), r"shape \[47\]"),
    ],
)
async def test_foreign_weights_are_refused_and_the_old_ones_keep_serving(
    engine_of, model_folder, tmp_path, damage, message
):
    engine = await engine_of()
    tasks = await start_calls(engine, 1)
    folder = tmp_path / "policy"
    shutil.copytree(model_folder("qwen2", seed=1), folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=message):
        await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    tasks.hurry()
    rollout = await tasks[0]
    assert (rollout.reason, len(rollout.tokens)) == (FinishReason.LENGTH, 240)
    assert {c.policy_version for c in rollout.chunks} == {0}


async def test_a_truncated_weight_file_is_an_engine_error(model_folder, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(model_folder(), folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    engine = TorchEngine(TorchEngineOptions(slots=2, max_context_tokens=64, device="cpu"))
    with pytest.raises(EngineError, match="cannot be read"):
        await engine.start(folder, 0)


async def test_under_cache_pressure_calls_are_preempted_without_loss(engine_of):
    roomy, tight = await engine_of(slots=8), await engine_of(slots=8, kv_token_capacity=600)
    calls = [make_call(f"t{i}", prompt_ids(i, 6 + i), max_new_token_count=180 + 5 * i) for i in range(8)]
    wanted = [await collect(roomy, call) for call in calls]
    # What admission expects of these calls is too little: it has seen nothing but short responses.
    await asyncio.gather(*(collect(tight, make_call(f"s{i}", max_new_token_count=20)) for i in range(8)))
    found = await asyncio.gather(*(collect(tight, call) for call in calls))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert tight.status().reprefill_token_total > 0
    assert tight.status().kv_tokens_used == 0


async def test_a_preempted_call_survives_a_kept_kv_swap_with_honest_stamps(engine_of, model_folder):
    engine = await engine_of(slots=4, kv_token_capacity=400)
    await asyncio.gather(*(collect(engine, make_call(f"s{i}", max_new_token_count=20)) for i in range(4)))
    calls = [make_call(f"t{i}", prompt_ids(i, 8), max_new_token_count=180) for i in range(4)]

    def preempted() -> bool:
        return any(sequence.started for sequence in list(engine._thread.waiting))

    at_full_speed = slow_steps(engine, preempted)
    tasks = [asyncio.create_task(collect(engine, call)) for call in calls]
    await until(preempted)
    await engine.load(model_folder("qwen2", seed=1), 1, OnNewVersion.KEEP_KV)
    assert engine.status().reprefill_token_total == 0
    at_full_speed.set()
    for call, rollout in zip(calls, await asyncio.gather(*tasks), strict=True):
        assert len(rollout.tokens) == 180
        ids = np.concatenate((call.context_ids, rollout.tokens))
        at = len(call.context_ids) - 1
        for chunk in rollout.chunks:
            if chunk.kv_min_version == chunk.policy_version:
                wanted = hf_logprobs(model_folder("qwen2", seed=chunk.policy_version), ids)
                np.testing.assert_allclose(chunk.behavior_logprobs, wanted[at : at + len(chunk.token_ids)], atol=1e-4)
            at += len(chunk.token_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": np.empty(0, np.int32)}, "context_ids: empty"),
        ({"context": np.array([3, VOCAB], np.int32)}, r"context_ids\[1\]=61 is outside the vocabulary"),
        ({"context": np.array([-1], np.int32)}, r"context_ids\[0\]=-1"),
        ({"context": prompt_ids(0, 256)}, "context_ids: 256 tokens leave no room"),
        ({"prompt_token_count": 13}, "prompt_token_count=13"),
        ({"max_new_token_count": 0}, "max_new_token_count=0"),
        ({"chunk_token_count": 0}, "chunk_token_count=0"),
        ({"temperature": -1.0}, r"sampling\.temperature=-1"),
        ({"temperature": float("nan")}, r"sampling\.temperature=nan"),
        ({"top_p": 0.0}, r"sampling\.top_p=0"),
        ({"top_k": -2}, r"sampling\.top_k=-2"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids: 61"),
    ],
)
async def test_a_wrong_call_is_refused_with_the_field_s_name(engine_of, changes, message):
    engine = await engine_of()
    with pytest.raises(DataError, match=message):
        await collect(engine, make_call("t", **changes))


async def test_scoring_refuses_foreign_tokens_and_overlong_sequences(engine_of):
    engine = await engine_of()
    with pytest.raises(DataError, match=r"sequences\[1\]"):
        await engine.score([prompt_ids(0), np.array([1, VOCAB], np.int32)])
    with pytest.raises(DataError, match="257 tokens"):
        await engine.score([prompt_ids(0, 257)])


async def test_weights_with_nan_fail_their_calls_and_not_the_engine(engine_of, model_folder, tmp_path):
    engine = await engine_of()
    folder = tmp_path / "policy"
    shutil.copytree(model_folder(), folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    with pytest.raises(EngineError, match="not finite under policy version 1"):
        await collect(engine, make_call())
    await engine.load(model_folder(), 2, OnNewVersion.INTERRUPT)
    assert len((await collect(engine, make_call())).tokens) == 40


async def test_closing_ends_calls_as_interrupted_and_refuses_new_ones(engine_of):
    engine = await engine_of(slots=1)
    running = (await start_calls(engine, 1))[0]
    waiting = asyncio.create_task(collect(engine, make_call("waiting")))
    await until(lambda: engine.status().waiting_count == 1)
    await engine.aclose()
    assert (await running).reason is FinishReason.INTERRUPTED
    assert (await waiting).reason is FinishReason.INTERRUPTED
    with pytest.raises(GenerationRefused):
        await collect(engine, make_call())


async def test_a_failure_of_the_model_thread_reaches_every_caller(engine_of):
    engine = await engine_of()
    tasks = await start_calls(engine, 2)

    def fail() -> None:
        raise RuntimeError("out of memory")

    engine._thread.post(fail)
    for task in tasks:
        with pytest.raises(EngineError, match="out of memory"):
            await task
    with pytest.raises(EngineError, match="out of memory"):
        engine.status()
    with pytest.raises(EngineError, match="out of memory"):
        await collect(engine, make_call())


async def test_pace_stretches_decode_steps_to_the_curve(engine_of):
    engine = await engine_of(pace=((1, 0.01), (8, 0.02)))
    await collect(engine, make_call(max_new_token_count=10))
    status = engine.status()
    assert status.busy_seconds_total >= 10 * 0.01
    assert status.running_slot_seconds_total == pytest.approx(status.busy_seconds_total, rel=0.2)


def test_options_refuse_a_cache_that_does_not_hold_one_call():
    with pytest.raises(ConfigError, match="kv_token_capacity=100"):
        TorchEngineOptions(slots=4, max_context_tokens=128, kv_token_capacity=100)


def test_pace_is_linear_between_its_points():
    options = TorchEngineOptions(slots=4, max_context_tokens=128, pace=((1, 0.01), (3, 0.03)))
    assert [options.step_seconds(n) for n in (1, 2, 3, 9)] == pytest.approx([0.01, 0.02, 0.03, 0.03])


async def test_a_swap_that_breaks_the_engine_raises_in_its_caller(engine_of, model_folder):
    engine = await engine_of()

    def broken(_weights: object) -> None:
        raise RuntimeError("no such device")

    engine._thread.batch.model.swap = broken
    async with asyncio.timeout(10):
        with pytest.raises(EngineError, match="no such device"):
            await engine.load(model_folder(), 1, OnNewVersion.INTERRUPT)
    async with asyncio.timeout(10):
        await engine.aclose()
    with pytest.raises(EngineError, match="no such device"):
        engine.status()
