"""The engine's numbers beside the engine contract: against Hugging Face, itself resumed, alone and in company."""

import asyncio

import numpy as np
import pytest

from rollmesh.generator.engines.torch.kernels import NumpyMultiply, TorchMultiply

from ...kit.generation import collect, hf_logprobs, make_call, prompt_ids
from .conftest import CONFIGS


@pytest.fixture(params=[TorchMultiply, NumpyMultiply])
def _either_multiply(request, monkeypatch):
    """Both ways to multiply, whichever this machine would prefer."""
    monkeypatch.setattr("rollmesh.generator.engines.torch.decoder_model.fastest_multiply", lambda *_: request.param())


@pytest.mark.usefixtures("_either_multiply")
@pytest.mark.parametrize("name", CONFIGS)
async def test_logprobs_match_teacher_forcing_while_rows_grow_through_length_tiers(engine_of, model_folder, name):
    engine = await engine_of(name)
    calls = [make_call(f"t{i}", prompt_ids(i, 3 + 9 * i), max_new_token_count=180 - 15 * i) for i in range(5)]
    for call, rollout in zip(calls, await asyncio.gather(*(collect(engine, c) for c in calls)), strict=True):
        assert len(rollout.tokens) == call.max_new_token_count
        rollout.check_pure([model_folder(name)])


@pytest.mark.usefixtures("_either_multiply")
@pytest.mark.parametrize("name", CONFIGS)
async def test_scores_match_teacher_forcing_for_ragged_sequences(engine_of, model_folder, name):
    engine = await engine_of(name)
    engine._thread.batch.model.forward_tokens = 64  # one sequence is longer than a pass
    sequences = [prompt_ids(i, count) for i, count in enumerate((40, 3, 17, 1, 100))]
    for ids, scores in zip(sequences, await engine.score(sequences), strict=True):
        assert len(scores) == len(ids) - 1
        np.testing.assert_allclose(scores, hf_logprobs(model_folder(name), ids), atol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("cut", [1, 23, 70])
async def test_a_rollout_resumed_on_another_engine_equals_an_uninterrupted_one(engine_of, temperature, cut):
    first, second = await engine_of(slots=3), await engine_of(slots=5)
    call = make_call("t", temperature=temperature, max_new_token_count=100)
    whole = await collect(first, call)
    begun = await collect(first, make_call("t", temperature=temperature, max_new_token_count=cut))
    rest_call = make_call(
        "t",
        np.concatenate((call.context_ids, begun.tokens)),
        temperature=temperature,
        prompt_token_count=len(call.context_ids),
        max_new_token_count=100 - cut,
    )
    crowd = [collect(second, make_call(f"crowd{i}", prompt_ids(i, 20 + i))) for i in range(4)]
    rest, *_ = await asyncio.gather(collect(second, rest_call), *crowd)
    np.testing.assert_array_equal(np.concatenate((begun.tokens, rest.tokens)), whole.tokens)
    np.testing.assert_allclose(np.concatenate((begun.logprobs, rest.logprobs)), whole.logprobs, atol=1e-4)


async def test_tokens_do_not_depend_on_the_company_of_a_call(engine_of):
    engine = await engine_of(slots=16, max_context_tokens=300)
    calls = [make_call(f"t{i}", prompt_ids(i, 5 + 7 * i), max_new_token_count=30 + 10 * i) for i in range(12)]
    alone = [await collect(engine, call) for call in calls[::3]]
    together = await asyncio.gather(*(collect(engine, call) for call in reversed(calls)))
    for one, other in zip(alone, together[::-1][::3], strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)


async def test_seed_and_trajectory_decide_the_noise(engine_of):
    engine = await engine_of()
    calls = [make_call("a"), make_call("a"), make_call("b"), make_call("a", seed=8)]
    same, again, other_trajectory, other_seed = await asyncio.gather(*(collect(engine, c) for c in calls))
    np.testing.assert_array_equal(same.tokens, again.tokens)
    assert (same.tokens != other_trajectory.tokens).any()
    assert (same.tokens != other_seed.tokens).any()


async def test_bfloat16_stays_near_float32(engine_of):
    engine, reference = await engine_of(dtype="bfloat16"), await engine_of()
    sequences = [prompt_ids(i, 50) for i in range(3)]
    for coarse, fine in zip(await engine.score(sequences), await reference.score(sequences), strict=True):
        assert np.abs(coarse - fine).mean() < 0.05
    rollout = await collect(engine, make_call())
    assert np.isfinite(rollout.logprobs).all()


async def test_sampled_tokens_follow_the_model_s_distribution(engine_of):
    engine = await engine_of(slots=64)
    context = prompt_ids(5, 6)
    candidates = [np.append(context, np.int32(t)) for t in range(61)]
    probability = np.exp([s[-1] for s in await engine.score(candidates)])
    calls = [make_call(f"t{i}", context, max_new_token_count=1) for i in range(2000)]
    drawn = np.array([r.tokens[0] for r in await asyncio.gather(*(collect(engine, c) for c in calls))])
    counts = np.bincount(drawn, minlength=61)
    expected = probability * len(calls)
    likely = expected > 5
    chi_square = ((counts - expected)[likely] ** 2 / expected[likely]).sum()
    assert chi_square < 2.0 * likely.sum() + 20
