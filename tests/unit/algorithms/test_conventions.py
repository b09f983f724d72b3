"""Conventions that docs/methods.md states, each with numbers worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import AGGREGATIONS, aggregate
from rollmesh.algorithms.losses import LossInput, TokenLoss, gspo, loss_options
from rollmesh.algorithms.ratios import k1, k3
from rollmesh.config.advantage_methods import ADVANTAGES
from rollmesh.config.loss_methods import LOSSES

from .random_trajectories import columns

ADVANTAGES_OF: dict[str, tuple[list[float], list[float]]] = {
    # rewards 1, 0, 0, 1, 1 and then a group of one with reward 5; the sample standard deviation is sqrt(0.3)
    "grpo": ([0.4 / math.sqrt(0.3), -0.6 / math.sqrt(0.3)], [0.0]),
    "dr_grpo": ([0.4, -0.6], [0.0]),
    "rloo": ([0.5, -0.75], [0.0]),
    # over the batch: mean 8/6, squares 28 - 6 (8/6)^2 = 52/3, variance 52/15
    "reinforce_pp": ([-(1 / 3) / math.sqrt(52 / 15), -(4 / 3) / math.sqrt(52 / 15)], [(11 / 3) / math.sqrt(52 / 15)]),
}


@pytest.mark.parametrize("name", sorted(ADVANTAGES_OF))
def test_an_advantage_divides_by_what_the_methods_page_says_and_compares_within_its_unit(name: str) -> None:
    got = ADVANTAGES.bind(name, {})(columns([1.0, 0.0, 0.0, 1.0, 1.0, 5.0], [0, 0, 0, 0, 0, 1]))
    (right, wrong), alone = ADVANTAGES_OF[name]
    expected = torch.tensor([right, wrong, wrong, right, right, *alone], dtype=torch.float64)
    torch.testing.assert_close(got, expected, rtol=5e-6, atol=0)


def minibatch(mask: list[bool], log_ratio: float = math.log(1.1)) -> LossInput:
    """Two sequences of 4 tokens and 1 token, advantages 2 and -1; every token has the same ratio to pi_old."""
    logprobs = torch.full((5,), -1.0, dtype=torch.float64, requires_grad=True)
    return LossInput(
        logprobs=logprobs,
        old_logprobs=logprobs.detach() - log_ratio,
        behavior_logprobs=logprobs.detach() - log_ratio - math.log(3.0),
        advantages=torch.tensor([2.0, 2.0, 2.0, 2.0, -1.0], dtype=torch.float64),
        mask=torch.tensor(mask),
        sequence_index=torch.tensor([0, 0, 0, 0, 1]),
        sequence_count=2,
    )


def total(name: str, data: LossInput) -> Tensor:
    """The loss of the minibatch with the defaults of the loss."""
    method = LOSSES[name]
    result: TokenLoss = LOSSES.bind(name, {})(data, loss_options(method, dual_clip=10.0))
    weights = AGGREGATIONS[method.aggregation](torch.ones(5, dtype=torch.bool), data.sequence_index, 2)
    return aggregate(result.loss, data.mask, weights / weights.sum())


def value(name: str, data: LossInput) -> float:
    """The same as a number."""
    return float(total(name, data).detach())


ALL, STALE = [True] * 5, [False, True, True, True, True]
LOSS_OF: dict[str, tuple[float, float]] = {
    # r = 1.1 lies within the bounds; pi_old / mu = 3 is capped at 2 by tis; token_mean divides by 5 in both cases
    "ppo_clip": (-(4 * 2.2 - 1.1) / 5, -(3 * 2.2 - 1.1) / 5),
    "decoupled_ppo": (-3 * (4 * 2.2 - 1.1) / 5, -3 * (3 * 2.2 - 1.1) / 5),
    "tis": (-2 * (4 * 2.2 - 1.1) / 5, -2 * (3 * 2.2 - 1.1) / 5),
    # log pi = -1
    "cispo": ((4 * 2.2 - 1.1) / 5, (3 * 2.2 - 1.1) / 5),
    # the product of two ratios, 1.21, for every token but the first, whose factor is 1; the masked one counts as 1 too
    "minpro": ((2.2 + 3 * 2.42 - 1.1) / 5, (3 * 2.2 - 1.1) / 5),
    # the ratio of the wrong answer is cut at 1
    "topr": ((4 * 2 - 1) / 5, (3 * 2 - 1) / 5),
    # log pi = -1, and 0.05 log(1.1)^2 for every token in the loss
    "kimi": ((4 * 2 - 1) / 5 + 0.05 * math.log(1.1) ** 2, (3 * 2 - 1) / 5 + 0.04 * math.log(1.1) ** 2),
    # s is cut at 1 + 4e-4 where A > 0, not cut where A < 0; each sequence weighs a half, divided by its 4 or 1 tokens
    "gspo": ((-2 * 1.0004 + 1.1) / 2, (-2 * 1.0004 * 3 / 4 + 1.1) / 2),
}


@pytest.mark.parametrize("name", sorted(LOSSES.methods))
def test_a_masked_token_leaves_the_numerator_of_a_loss_and_stays_in_its_denominator(name: str) -> None:
    whole, stale = LOSS_OF[name]
    assert value(name, minibatch(ALL)) == pytest.approx(whole, rel=1e-9)
    assert value(name, minibatch(STALE)) == pytest.approx(stale, rel=1e-9)


def test_gspo_counts_the_original_tokens_of_a_sequence_whose_stale_tokens_are_masked() -> None:
    data, options = minibatch(STALE, 1e-4), loss_options(LOSSES["gspo"])
    ratio = gspo(data, options).ratio
    torch.testing.assert_close(ratio[:4], torch.full((4,), math.exp(0.75e-4), dtype=torch.float64))
    lengths, kept = torch.tensor([4.0, 1.0], dtype=torch.float64), data.mask.double()
    difference = (data.logprobs - data.old_logprobs) * kept
    sums = torch.zeros(2, dtype=torch.float64).index_add(0, data.sequence_index, difference)
    surrogate = -((sums / lengths).exp() * torch.tensor([2.0, -1.0])).sum() / 2
    (expected,) = torch.autograd.grad(surrogate, data.logprobs)
    (got,) = torch.autograd.grad(total("gspo", data), data.logprobs)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)


def test_the_kl_estimators_are_those_of_the_methods_page() -> None:
    log_p, log_q = torch.tensor([-1.0], dtype=torch.float64), torch.tensor([-1.5], dtype=torch.float64)
    assert float(k1(log_p, log_q)) == pytest.approx(0.5)
    assert float(k3(log_p, log_q)) == pytest.approx(math.exp(-0.5) - 1 + 0.5)
