"""Truncated sampling of the torch engine: what is drawn, from which sets, and with which log-probabilities."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollmesh.generator.engines.torch.sampling import PARAMETERS, StepSampling, sample, uniforms
from rollmesh.types import SamplingParams

from ...kit.generation import VOCAB, collect, hf_truncated, logprob_over, make_call, p_value, prompt_ids, start_calls

DRAWS, ROWS, CHOICES = 1_000_000, 20_000, 20
TRUNCATED = {"top_p": 0.8, "kept_tokens": VOCAB}


def step_sampling(*params: SamplingParams, choices: int = VOCAB) -> StepSampling:
    rows = [tuple(getattr(each, name) for name in PARAMETERS.names or ()) for each in params]
    return StepSampling.of_rows(np.array(rows, PARAMETERS), choices, torch.device("cpu"))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_p=0.9, kept_tokens=VOCAB),
        SamplingParams(min_p=0.2, temperature=1.4, kept_tokens=VOCAB),
        SamplingParams(top_p=0.85, top_k=12, temperature=1.2, kept_tokens=12),
        SamplingParams(top_p=0.85, top_k=12, min_p=0.2, temperature=1.2, kept_tokens=12),
    ],
    ids=["top_p", "min_p", "top_p of top_k", "all"],
)
def test_a_million_draws_follow_the_renormalised_distribution_of_transformers(params: SamplingParams) -> None:
    logits = torch.randn(1, CHOICES, generator=torch.Generator().manual_seed(3))
    wanted = hf_truncated(logits, params)[0].numpy()
    kept = np.flatnonzero(wanted)
    assert 2 < len(kept) < CHOICES
    rows, sampling = logits.expand(ROWS, CHOICES), step_sampling(*[params] * ROWS, choices=CHOICES)
    keys, counts = np.arange(ROWS, dtype=np.uint64) * np.uint64(0x9E37_79B9), np.zeros(CHOICES, np.int64)
    for position in range(DRAWS // ROWS):
        noise = torch.from_numpy(uniforms(keys, np.full(ROWS, position)))[:, None]
        drawn = sample(rows, noise, sampling)
        counts += np.bincount(drawn.tokens.numpy(), minlength=CHOICES)
        assert (drawn.kept_sets.counts == len(kept)).all() and (drawn.kept_sets.ids.reshape(ROWS, -1) == kept).all()
        np.testing.assert_allclose(drawn.logprobs.numpy(), np.log(wanted[drawn.tokens.numpy()]), atol=1e-6)
    assert counts.sum() == counts[kept].sum() == DRAWS
    assert p_value(counts[kept], wanted[kept]) > 0.001


@pytest.mark.parametrize("choices", [50, 3000])
def test_equal_probabilities_are_kept_by_id_whatever_the_other_rows_of_a_step_are(choices: int) -> None:
    logits = torch.randn(4, choices, generator=torch.Generator().manual_seed(1)).mul(4).round().div(4)
    noise, narrow = torch.full((4, 1), 0.5, dtype=torch.float64), SamplingParams(top_k=9, kept_tokens=9)
    companies = [narrow, SamplingParams(top_p=0.9), SamplingParams(min_p=0.01, kept_tokens=40)]
    for company in companies:
        sampling = step_sampling(narrow, company, company, narrow, choices=choices)
        sets = sample(logits, noise, sampling).kept_sets
        for row, ids in ((0, sets.ids[:9]), (3, sets.ids[-9:])):
            values = logits[row].tolist()
            assert ids.tolist() == sorted(sorted(range(choices), key=lambda i, v=values: (-v[i], i))[:9])


def test_rows_of_one_step_are_truncated_each_by_its_own_parameters() -> None:
    """Training rows keep their sets; full, greedy and evaluation rows have log-probabilities over the vocabulary."""
    params = [
        SamplingParams(),
        SamplingParams(top_p=0.6, kept_tokens=VOCAB),
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.6),
        SamplingParams(min_p=0.1, temperature=2.0, kept_tokens=VOCAB),
        SamplingParams(top_p=0.99, kept_tokens=4),
    ]
    logits = torch.randn(len(params), VOCAB, generator=torch.Generator().manual_seed(5)) * 2
    logits[3] = logits[1]
    noise = torch.full((len(params), 1), 0.4, dtype=torch.float64)
    tokens, logprobs, sets = sample(logits, noise, step_sampling(*params))
    kept = np.split(sets.ids, np.cumsum(sets.counts))[:-1]
    for row, ids in zip((1, 4), kept[:2], strict=True):
        assert ids.tolist() == hf_truncated(logits[row : row + 1], params[row])[0].nonzero().flatten().tolist()
    wide = hf_truncated(logits[5:], params[5])[0]
    assert len(wide.nonzero()) > 4 and kept[2].tolist() == sorted(wide.topk(4).indices.tolist())
    for row, ids in zip((1, 4, 5), kept, strict=True):
        wanted = logprob_over(ids.tolist(), int(tokens[row]), logits[row], params[row].temperature)
        assert float(logprobs[row]) == pytest.approx(wanted, abs=1e-6)
    whole = list(range(VOCAB))
    for row in (0, 2, 3):
        wanted = logprob_over(whole, int(tokens[row]), logits[row], 1.0)
        assert float(logprobs[row]) == pytest.approx(wanted, abs=1e-6)
    assert tokens[1] == tokens[3] and tokens[2] == logits[2].argmax()


async def test_a_truncated_rollout_interrupted_and_resumed_elsewhere_has_the_tokens_and_sets_of_a_whole_one(engine_of):
    first, second = await engine_of(slots=3), await engine_of(slots=5)
    running = await start_calls(first, 1, chunk_token_count=5, **TRUNCATED)
    await first.interrupt(None)
    (begun,) = await running.end()
    whole = await collect(first, replace(begun.call, trajectory_id="t0"))
    rest_call = replace(begun.call, context_ids=begun.ids, max_new_token_count=200 - len(begun.tokens))
    crowd = [collect(second, make_call(f"crowd{i}", prompt_ids(i, 20 + i))) for i in range(4)]
    rest, *_ = await asyncio.gather(collect(second, rest_call), *crowd)
    assert 0 < len(begun.tokens) < 200
    np.testing.assert_array_equal(np.concatenate((begun.tokens, rest.tokens)), whole.tokens)
    assert begun.kept + rest.kept == whole.kept and all(whole.kept)


async def test_preempted_calls_and_prompts_from_the_cache_keep_the_sets_of_their_tokens(engine_of):
    roomy, tight = await engine_of(slots=8), await engine_of(slots=8, kv_token_capacity=600)
    calls = [make_call(f"t{i}", prompt_ids(0, 6), max_new_token_count=180 + 5 * i, **TRUNCATED) for i in range(8)]
    wanted = await asyncio.gather(*(collect(roomy, call) for call in calls))
    await asyncio.gather(*(collect(tight, make_call(f"s{i}", max_new_token_count=20)) for i in range(8)))
    found = await asyncio.gather(*(collect(tight, call) for call in calls))
    assert tight.status().preemption_total > 0 and roomy.status().cached_token_total > 0
    assert [r.kept for r in found] == [r.kept for r in wanted]
