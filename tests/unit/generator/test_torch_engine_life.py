"""Limits, loads, staged weights, pressure and errors of the torch engine, beside the cases of the engine contract."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.model_thread import step_seconds
from rollmesh.generator.engines.torch.slots import CAPACITY, RunningCall
from rollmesh.generator.engines.torch.torch_engine import TorchEngine

from ...kit.generation import Rollout, collect, hf_logprobs, make_call, prompt_ids
from ...kit.waiting import reached

T = TypeVar("T")


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


async def test_chunks_longer_than_the_ring_of_undelivered_tokens_are_split(engine_of):
    engine = await engine_of(max_context_tokens=512)
    rollout = await collect(engine, make_call(max_new_token_count=CAPACITY + 40, chunk_token_count=1000))
    assert len(rollout.tokens) == CAPACITY + 40
    again = await collect(engine, make_call(max_new_token_count=CAPACITY + 40, chunk_token_count=3))
    np.testing.assert_array_equal(rollout.tokens, again.tokens)


async def between_parts(engine: TorchEngine, command: Coroutine[Any, Any, T]) -> tuple[T, list[Rollout]]:
    """Give a command after the first part of the prefill of 16 calls; its result, and the calls."""
    batch, going_on = engine._thread.batch, threading.Event()
    admit = batch.admit

    def admit_and_wait(calls: list[RunningCall]) -> None:
        admit(calls)
        going_on.wait(60)

    batch.admit = admit_and_wait
    await engine.pause()
    calls = [make_call(f"t{i}", prompt_ids(i, 240), max_new_token_count=8) for i in range(16)]
    tasks = [asyncio.create_task(collect(engine, call)) for call in calls]
    await reached(lambda: engine.status().waiting_count == 16)
    await engine.resume()
    await reached(lambda: engine.status().running_count > 0)
    given = asyncio.create_task(command)
    await asyncio.sleep(0)
    going_on.set()
    return await given, list(await asyncio.gather(*tasks))


async def test_calls_that_start_together_are_prefilled_in_parts_and_a_command_between_these_is_obeyed(engine_of):
    engine = await engine_of(slots=16)
    interrupted, rollouts = await between_parts(engine, engine.interrupt(["t15"]))
    assert interrupted == 1
    assert [len(r.tokens) for r in rollouts] == [8] * 15 + [0]
    status = engine.status()
    assert status.prefill_token_total == 15 * 239
    assert status.decode_step_total == 8, "they were decoded together"


async def test_calls_without_a_token_get_the_cache_of_the_version_that_a_keep_kv_load_puts_in_service(
    engine_of, model_folder
):
    engine = await engine_of(slots=16)
    folder = model_folder("qwen2", seed=1)
    await engine.stage(folder, 1)
    _, rollouts = await between_parts(engine, engine.load(folder, 1, OnNewVersion.KEEP_KV))
    for rollout in rollouts:
        assert (rollout.stamps, len(rollout.tokens)) == ({(1, 1)}, 8)
        rollout.check_pure([model_folder("qwen2"), folder])
    status = engine.status()
    assert status.prefill_token_total > 16 * 239, "some were prefilled before the load, and again after it"
    assert (status.reprefill_token_total, status.preemption_total, status.kv_tokens_used) == (0, 0, 0)


async def test_a_staged_policy_is_swapped_without_being_read_again(engine_of, model_folder, tmp_path):
    engine = await engine_of()
    folder = tmp_path / "policy"
    shutil.copytree(model_folder("qwen2", seed=1), folder)
    await engine.stage(folder, 1)
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
    folder = tmp_path / "policy"
    shutil.copytree(model_folder("qwen2", seed=1), folder)
    config, tensors = json.loads((folder / "config.json").read_text()), load_file(folder / "model.safetensors")
    damage(config, tensors)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(EngineError, match=message):
        await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    (await collect(engine, make_call())).check_pure([model_folder("qwen2")])


async def test_a_context_that_no_policy_of_the_model_can_have_is_a_wrong_setting(engine_of):
    with pytest.raises(ConfigError, match=r"max_context_tokens=4097 is more than the model's .*=\d+"):
        await engine_of(max_context_tokens=4097)


async def test_under_cache_pressure_calls_are_preempted_without_loss(engine_of):
    roomy, tight = await engine_of(slots=8), await engine_of(slots=8, kv_token_capacity=600)
    calls = [make_call(f"t{i}", prompt_ids(i, 6 + i), max_new_token_count=180 + 5 * i) for i in range(8)]
    wanted = await asyncio.gather(*(collect(roomy, call) for call in calls))
    assert roomy.status().reprefill_token_total == 0
    # What admission expects of these calls is too little: it has seen nothing but short responses.
    await asyncio.gather(*(collect(tight, make_call(f"s{i}", max_new_token_count=20)) for i in range(8)))
    found = await asyncio.gather(*(collect(tight, call) for call in calls))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    assert tight.status().reprefill_token_total > 0
    assert (tight.status().preemption_total > 0, roomy.status().preemption_total) == (True, 0)
    assert tight.status().kv_tokens_used == 0


async def test_a_preempted_call_survives_a_kept_kv_swap_with_honest_stamps(engine_of, model_folder):
    engine = await engine_of(slots=4, kv_token_capacity=400)
    await asyncio.gather(*(collect(engine, make_call(f"s{i}", max_new_token_count=20)) for i in range(4)))
    calls = [make_call(f"t{i}", prompt_ids(i, 8), max_new_token_count=180) for i in range(4)]

    def preempted() -> bool:
        return any(sequence.started for sequence in list(engine._thread.waiting))

    at_full_speed = slow_steps(engine, preempted)
    tasks = [asyncio.create_task(collect(engine, call)) for call in calls]
    await reached(preempted)
    await engine.load(model_folder("qwen2", seed=1), 1, OnNewVersion.KEEP_KV)
    assert engine.status().reprefill_token_total == 0
    at_full_speed.set()
    for call, rollout in zip(calls, await asyncio.gather(*tasks), strict=True):
        assert len(rollout.tokens) == 180
        at = len(call.context_ids) - 1
        for chunk in rollout.chunks:
            if chunk.kv_min_version == chunk.policy_version:
                wanted = hf_logprobs(model_folder("qwen2", seed=chunk.policy_version), rollout.ids)
                np.testing.assert_allclose(chunk.behavior_logprobs, wanted[at : at + len(chunk.token_ids)], atol=1e-4)
            at += len(chunk.token_ids)


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


async def test_a_failure_of_the_model_thread_reaches_every_caller(engine_of):
    engine = await engine_of()
    slow_steps(engine, lambda: True)
    calls = [make_call(f"t{i}", prompt_ids(i, 8), max_new_token_count=240) for i in range(2)]
    tasks = [asyncio.create_task(collect(engine, call)) for call in calls]
    await reached(lambda: engine.status().running_count == 2)

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


def test_pace_is_linear_between_its_points():
    pace = [(3, 0.03), (1, 0.01)]
    assert [step_seconds(pace, n) for n in (1, 2, 3, 9)] == pytest.approx([0.01, 0.02, 0.03, 0.03])


async def test_a_swap_that_breaks_the_engine_raises_in_its_caller(engine_of, model_folder):
    engine = await engine_of()

    def broken(_weights: object) -> None:
        raise RuntimeError("no such device")

    engine._thread.batch.model.swap = broken
    async with asyncio.timeout(60):
        with pytest.raises(EngineError, match="no such device"):
            await engine.load(model_folder(), 1, OnNewVersion.INTERRUPT)
    async with asyncio.timeout(60):
        await engine.aclose()
    with pytest.raises(EngineError, match="no such device"):
        engine.status()


NAMES = ["qwen2", "qwen2-untied-grouped", "qwen3", "llama3-biased"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_place", [False, True])
async def test_staged_weights_score_as_their_model_does_before_and_after_the_swap(
    engine_of, model_folder, name, in_place
):
    engine = await engine_of(name, cuda_graphs=in_place)
    ids = prompt_ids(3, 40)
    wanted = [hf_logprobs(model_folder(name, seed), ids) for seed in range(3)]
    for version in (1, 2):
        assert await engine.stage(model_folder(name, version), version)
        (staged,), (used,) = await engine.score([ids], version), await engine.score([ids])
        np.testing.assert_allclose(staged, wanted[version], atol=1e-4)
        np.testing.assert_allclose(used, wanted[version - 1], atol=1e-4)
        await engine.load(model_folder(name, version), version, OnNewVersion.KEEP_KV)
        rollout = await collect(engine, make_call(f"v{version}"))
        np.testing.assert_allclose((await engine.score([ids]))[0], wanted[version], atol=1e-4)
        rollout.check_pure([model_folder(name, seed) for seed in range(3)])


async def test_staged_weights_in_bfloat16_score_as_they_do_in_use(engine_of, model_folder):
    engine = await engine_of(dtype="bfloat16")
    await engine.stage(model_folder(seed=1), 1)
    staged = await engine.score([prompt_ids(3, 40)], 1)
    await engine.load(model_folder(seed=1), 1, OnNewVersion.INTERRUPT)
    np.testing.assert_array_equal(staged, await engine.score([prompt_ids(3, 40)]))


async def test_only_the_version_in_service_and_the_staged_one_can_be_scored_by_name(engine_of, model_folder):
    engine = await engine_of()
    ids = prompt_ids(3, 40)
    with pytest.raises(EngineError, match="policy version 1 is not loaded; stage it before it is scored"):
        await engine.score([ids], 1)
    await engine.stage(model_folder(seed=1), 1)
    await engine.score([ids], 1)
    await engine.load(model_folder(seed=1), 1, OnNewVersion.INTERRUPT)
    np.testing.assert_array_equal(await engine.score([ids], 1), await engine.score([ids]))
    with pytest.raises(EngineError, match="policy version 0 is not loaded"):
        await engine.score([ids], 0)
