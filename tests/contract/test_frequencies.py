"""What a real server samples at T = 1, where drafts verified wrongly show, and which tokens it counts as new."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollmesh.types import Float64Array

from ..kit.generation import VOCAB
from .served import LONG, TOLERANCE, Policies, Served, prompts

_REQUESTS = 16
_LEAST_P = 1e-3


def p_value(rows: Float64Array, tokens: Sequence[int]) -> float:
    """Return the chance of counts as far from expectation as these, if token i has the distribution ``rows[i]``.

    The counts of all tokens, less the sum of their probabilities, have the covariance sum_i (diag(p_i) - p_i p_i^T),
    also where p_i depends on the tokens before. Chi-square of one degree of freedom less than tokens.
    """
    gap = np.bincount(tokens, minlength=rows.shape[1]) - rows.sum(0)
    covariance = np.diag(rows.sum(0)) - rows.T @ rows
    square = gap @ np.linalg.pinv(covariance, hermitian=True) @ gap
    halves = torch.tensor([rows.shape[1] - 1, square], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(*halves))


@pytest.mark.parametrize(("copies", "is_found"), [(1, False), (2, True), (11, True)])
def test_padding_drafts_with_copies_of_token_0_is_found_by_its_frequency(copies: int, is_found: bool) -> None:
    """Each copy adds p(0) to the chance of token 0, as SGLang's NGRAM is suspected to do."""
    random = np.random.default_rng(7)
    rows = random.dirichlet(np.ones(VOCAB), 20_000)
    sampled = rows.copy()
    sampled[:, 0] = np.minimum(1.0, copies * rows[:, 0])
    sampled[:, 1:] *= (1 - sampled[:, :1]) / sampled[:, 1:].sum(1, keepdims=True)
    tokens = (sampled.cumsum(1) > random.random((len(rows), 1))).argmax(1)
    assert (p_value(rows, tokens.tolist()) < _LEAST_P) == is_found


@pytest.mark.parametrize("endpoint", ["sglang-overlap", "sglang-drafts"], indirect=True)
def test_a_server_samples_every_token_as_often_as_its_probability_says(
    endpoint: tuple[str, str | None], policies: Policies
) -> None:
    kind, url = endpoint
    assert url is not None
    # No load before it: 0.5.23 would load the policy into the draft model, too.
    with Served(url, policies) as served:
        answers = [served.start(prompt, LONG, extra_key="frequency") for prompt in prompts(_REQUESTS)]
        found = [answer.result() for answer in answers]
        version = int(served.version())
    rows, tokens, accepted = [], [], 0
    for answer in found:
        expected = policies.logprobs(version, answer.ids)[len(answer.prompt) - 1 : -1].double().exp().numpy()
        rows.append(expected / expected.sum(1, keepdims=True))
        tokens += answer.tokens
        accepted += answer.meta.get("spec_num_correct_drafts") or 0
    assert len(tokens) == _REQUESTS * LONG
    assert (accepted > 0) == (kind == "sglang-drafts")
    assert p_value(np.concatenate(rows), tokens) > _LEAST_P


@pytest.mark.parametrize("endpoint", ["sglang-overlap", "sglang-serial"], indirect=True)
def test_a_swap_in_place_is_exact_on_a_serial_schedule_and_stamped_one_token_early_on_the_overlapping_one(
    served: Served, endpoint: tuple[str, str | None]
) -> None:
    """Overlapping, the step under way at the pause was computed with the old weights, and its token is counted as new.
    This is why keep_kv turns that schedule off; once this test fails, it need not any more."""
    early = int(endpoint[0] == "sglang-overlap")
    assert in_place_gap(served, shift=early) <= TOLERANCE
    assert in_place_gap(served, shift=1 - early) > TOLERANCE


def in_place_gap(served: Served, shift: int) -> float:
    """Swap version 0 for 1 under 8 requests without touching their cache; the largest gap to a model whose tokens up
    to ``shift`` past the stamped one came from the old weights."""
    served.reset()
    futures = served.paused_under(8, "in_place")
    assert served.load(1, flush_cache=False).status_code == 200
    served.resume()
    gaps = []
    for answer in (future.result() for future in futures):
        (old, _, end), (new, _, _) = answer.spans
        swap = len(answer.prompt) + end - 1 + shift
        gaps.append(answer.gap(served.policies.mixed_logprobs(old, new, answer.ids, swap)))
    return max(gaps)
