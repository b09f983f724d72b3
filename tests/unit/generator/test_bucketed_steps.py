"""Decode steps padded to static shapes, as CUDA graphs need them: the same tokens, and nothing that padding touches.

Capture itself needs a GPU; here a capture is a function that checks what a replay would rely on.
"""

import asyncio

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from rollmesh.config.run import RunConfig
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.decode_step import bucket
from rollmesh.generator.engines.torch.kernels import NumpyMultiply, TorchMultiply
from rollmesh.generator.engines.torch.weights import load_weights

from ...kit.generation import collect, make_call, prompt_ids
from .conftest import CONFIGS
from .made_steps import CPU, StepBench


@pytest.fixture(params=[TorchMultiply, NumpyMultiply])
def bench_of(model_folder, monkeypatch, request):
    # Which one a model takes is a matter of timing, and they round differently: one for all that are compared.
    monkeypatch.setattr("rollmesh.generator.engines.torch.decoder_model.fastest_multiply", lambda *_: request.param())

    def make(name: str = "qwen2", **changes) -> StepBench:
        return StepBench(model_folder(name), **changes)

    with torch.inference_mode():
        yield make


@pytest.mark.parametrize("name", CONFIGS)
async def test_padded_steps_sample_the_same_tokens_as_plain_ones(engine_of, name):
    # 5 slots: 3 more rows are scratch at first; calls come, go and outgrow a tier of 256 tokens.
    plain = await engine_of(name, slots=5, max_context_tokens=400)
    padded = await engine_of(name, slots=5, max_context_tokens=400, cuda_graphs=True)
    calls = [make_call(f"t{i}", prompt_ids(i, 3 + 40 * i), max_new_token_count=14 + 10 * i) for i in range(7)]
    calls.append(make_call("greedy", prompt_ids(9, 8), temperature=0.0, max_new_token_count=40))
    wanted = await asyncio.gather(*(collect(plain, c) for c in calls))
    found = await asyncio.gather(*(collect(padded, c) for c in calls))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=2e-5)
        assert one.reason is other.reason


@pytest.mark.parametrize("lengths", [[5], [5, 17, 30], [5, 40, 31, 60, 8, 9, 1]])
def test_padded_logits_equal_plain_ones(bench_of, lengths):
    plain, padded = bench_of("qwen2-untied-grouped"), bench_of("qwen2-untied-grouped")
    rows = plain.fill(lengths)
    padded.fill(lengths)
    steppers = plain.stepper(padded=False), padded.stepper()
    assert min(stepper.prepare(rows) for stepper in steppers) >= 1
    tokens = plain.tokens(0, len(lengths))
    wanted, found = (stepper.logits(tokens).clone() for stepper in steppers)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_padded_step_writes_one_position_of_every_live_row_and_nothing_else_of_it(bench_of):
    bench = bench_of()
    lengths = [5, 17, 30, 40, 33]  # three rows of the first tier and two of the second
    rows = bench.fill(lengths)
    # The block is larger than what is in use, so there are rows to pad with.
    assert [tier.row_capacity for tier in bench.cache.tiers] == [4, 4]
    before = {slot: tuple(t.clone() for t in bench.cache.read(slot, 1000)) for slot in range(5)}
    stepper = bench.stepper()
    assert stepper.prepare(rows) == 2
    for step in range(2):
        stepper.logits(bench.tokens(step, 5))
    for slot, length in enumerate(lengths):
        changed = [
            (a != b).any(dim=axis)
            for a, b, axis in zip(before[slot], bench.cache.read(slot, 1000), (2, 3), strict=True)
        ]
        for positions in changed:
            assert set(torch.nonzero(positions)[:, -1].tolist()) == {length, length + 1}


def test_what_scratch_rows_hold_does_not_reach_a_call(bench_of):
    clean, dirty = bench_of(), bench_of()
    found = []
    for bench, garbage in ((clean, 0.0), (dirty, 1e4)):
        rows = bench.fill([5, 17, 30])
        for tier in bench.cache.tiers:
            beyond = slice(tier.rows(0, len(tier.slots)).stop, None)
            tier.keys[:, beyond] = tier.values[:, beyond] = garbage
        stepper = bench.stepper()
        stepper.prepare(rows)
        found.append([stepper.logits(bench.tokens(step, 3)).clone() for step in range(2)])
    torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


def test_a_call_that_takes_a_scratch_row_sees_none_of_what_padding_wrote(bench_of):
    used, fresh = bench_of(), bench_of()
    lengths = [5, 17, 30]
    stepper = used.stepper()
    stepper.prepare(used.fill(lengths))
    for step in range(2):
        stepper.logits(used.tokens(step, 3))
    for slot in range(3):
        used.cache.remove(slot)
    again = [9, 3, 28, 4]
    wanted = fresh.stepper()
    rows = fresh.fill(again)
    wanted.prepare(rows)
    used.fill(again)
    stepper.prepare(rows)
    tokens = fresh.tokens(3, 4)
    torch.testing.assert_close(stepper.logits(tokens), wanted.logits(tokens), atol=0, rtol=0)


def test_one_static_step_serves_every_set_of_rows_in_its_buckets(bench_of):
    bench = bench_of()
    captured = []
    stepper = bench.stepper(lambda work: captured.append(work) or work)
    lengths = [5, 17, 30]
    rows = bench.fill(lengths)
    made = []
    for _ in range(3):
        stepper.prepare(rows)
        stepper.logits(bench.tokens(0, 3))
        stepper.release()
        made.append(stepper.plan_count)
    assert made == [1, 2, 2]  # the second run captures
    bench.cache.add(3, 4)  # four rows: the same bucket
    stepper.prepare(np.append(rows, 4))
    stepper.logits(bench.tokens(0, 4))
    assert (len(bench.cache.views), len(captured)) == (1, 1)


def test_a_capture_is_not_replayed_after_the_block_has_moved(bench_of):
    bench = bench_of()

    def capture(work):
        addresses = [t.data_ptr() for tier in bench.cache.tiers for t in (tier.keys, tier.values)]

        def replay():
            assert addresses == [t.data_ptr() for tier in bench.cache.tiers for t in (tier.keys, tier.values)]
            return work()

        return replay

    stepper = bench.stepper(capture)
    lengths = [5, 6, 7, 8]
    bench.fill(lengths)
    for slot in (4, 5, 6):
        for _ in range(3):
            stepper.prepare(bench.in_rows(lengths))
            stepper.logits(bench.tokens(slot, len(lengths)))
        stepper.release()
        lengths.append(9)
        bench.cache.add(slot, 9)  # the fifth row doubles the block
    assert bench.cache.tiers[0].row_capacity == 8
    stepper.prepare(bench.in_rows(lengths))
    stepper.logits(bench.tokens(0, len(lengths)))
    assert len(bench.cache.views) == 1


def test_the_next_replay_computes_with_weights_that_were_swapped_in_place(bench_of, model_folder):
    bench, other = bench_of(), StepBench(model_folder("qwen2", seed=1))

    def addresses():
        return [t.data_ptr() for t in bench.model.weights.tensors()]

    stepper = bench.stepper()
    rows = bench.fill([5, 17, 30])
    stepper.prepare(rows)
    before = stepper.logits(bench.tokens(0, 3)).clone()
    at = addresses()
    bench.model.swap(load_weights(model_folder("qwen2", seed=1), bench.arch, torch.float32, CPU))
    assert addresses() == at
    stepper.prepare(rows)
    after = stepper.logits(bench.tokens(0, 3)).clone()
    wanted = other.stepper(padded=False)
    wanted.prepare(other.fill([5, 17, 30]))
    torch.testing.assert_close(after, wanted.logits(bench.tokens(0, 3)), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(before, after, atol=1e-2)


async def test_a_padded_engine_takes_new_weights_under_running_calls(engine_of, model_folder):
    engines = [await engine_of(slots=3), await engine_of(slots=3, cuda_graphs=True)]
    rollouts = []
    for engine in engines:
        stream = engine.generate(make_call("t", max_new_token_count=60, chunk_token_count=20))
        chunks = [await anext(stream)]
        await engine.load(model_folder("qwen2", seed=1), 1, OnNewVersion.INTERRUPT)
        chunks += [chunk async for chunk in stream]
        so_far = np.concatenate([make_call().context_ids, *(c.token_ids for c in chunks)])
        rest = make_call("t", so_far, prompt_token_count=12, max_new_token_count=30)
        rollouts.append(await collect(engine, rest))
        assert {c.policy_version for c in rollouts[-1].chunks} == {1}
        scores = (await engine.score([np.concatenate([so_far, rollouts[-1].tokens])]))[0]
        np.testing.assert_allclose(rollouts[-1].logprobs, scores[len(so_far) - 1 :], atol=1e-4)


def test_the_static_steps_kept_are_bounded(bench_of, monkeypatch):
    monkeypatch.setattr("rollmesh.generator.engines.torch.decode_step._MAX_STEPS", 2)
    bench = bench_of()
    stepper = bench.stepper()
    lengths: list[int] = [5, 5, 5, 5, 5, 5, 5, 5]
    bench.fill(lengths)
    for slot in range(7):
        stepper.prepare(bench.in_rows(lengths))
        stepper.logits(bench.tokens(0, 8 - slot))
        stepper.release()
        bench.cache.remove(slot)
    assert len(bench.cache.views) == 2


def test_buckets_are_powers_of_two_up_to_the_rows_there_are():
    assert [bucket(rows, 24) for rows in (1, 2, 3, 4, 5, 16, 17, 24)] == [1, 2, 4, 4, 8, 16, 24, 24]


def test_the_run_file_turns_graphs_on_for_the_torch_engine_only():
    model = {"name": "run", "folder": "run", "model": {"path": "model"}}
    on = RunConfig.model_validate({**model, "generator": {"cuda_graphs": True}})
    assert on.generator.cuda_graphs
    assert not RunConfig.model_validate(model).generator.cuda_graphs
    with pytest.raises(ValidationError, match="cuda_graphs=True: for engine=torch only"):
        RunConfig.model_validate({**model, "generator": {"cuda_graphs": True, "engine": "sglang"}})
