"""Frequencies of what a server samples at T = 1, where drafts that are verified wrongly show."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from rollmesh.types import Float64Array

from ..kit.generation import VOCAB
from .served import LONG, Policies, Served, prompts

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
