"""Capture and replay on a real GPU; skipped where there is none."""

import asyncio

import numpy as np
import pytest
import torch

from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.decode_step import Stepper
from rollmesh.generator.engines.torch.weights import load_weights

from ...kit.generation import collect, make_call, prompt_ids
from .made_steps import CPU, SLOTS, StepBench

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def test_replayed_steps_equal_the_same_steps_launched_one_by_one(model_folder):
    device = torch.device("cuda")
    with torch.inference_mode():
        replayed, launched = (StepBench(model_folder("qwen2"), device=device) for _ in range(2))
        steppers = Stepper(replayed.model, replayed.cache, SLOTS, padded=True), launched.stepper()
        lengths = [5, 17, 30]
        rows = [bench.fill(lengths) for bench in (replayed, launched)]
        new_weights = load_weights(model_folder("qwen2", seed=1), replayed.arch, torch.float32, CPU)
        for turn in range(6):  # launched, captured, replayed, replayed with other weights, ...
            if turn == 4:
                for bench in (replayed, launched):
                    bench.model.swap(new_weights)
            found = []
            for bench, stepper, here in zip((replayed, launched), steppers, rows, strict=True):
                stepper.prepare(here)
                found.append([stepper.logits(bench.tokens(10 * turn + step, 3)).clone() for step in range(2)])
                stepper.release()
            torch.testing.assert_close(found[0], found[1], atol=0, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_an_engine_with_graphs_samples_what_one_without_samples(engine_of, model_folder, dtype):
    options = {"slots": 5, "max_context_tokens": 400, "device": "cuda", "dtype": dtype}
    plain, graphs = await engine_of(**options), await engine_of(**options, cuda_graphs=True)
    calls = [make_call(f"t{i}", prompt_ids(i, 3 + 40 * i), max_new_token_count=20 + 23 * i) for i in range(8)]
    for version in (0, 1):
        rollouts = []
        for engine in (plain, graphs):
            rollouts.append(await asyncio.gather(*(collect(engine, call) for call in calls)))
            await engine.load(model_folder("qwen2", seed=1), version + 1, OnNewVersion.DRAIN)
        for one, other in zip(*rollouts, strict=True):
            if dtype == "float32":
                np.testing.assert_array_equal(one.tokens, other.tokens)
                np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
            assert len(one.tokens) == len(other.tokens)
    if dtype == "bfloat16":  # other shapes round otherwise; each must still be the engine's own distribution
        for call, rollout in zip(calls, rollouts[1], strict=True):
            scores = (await graphs.score([np.concatenate((call.context_ids, rollout.tokens))]))[0]
            gaps = np.abs(rollout.logprobs - scores[len(call.context_ids) - 1 :])
            assert gaps.mean() < 0.05
