"""Losses and aggregations equal formulas written out token by token; gradients are their derivatives."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import AGGREGATIONS, aggregate
from rollmesh.algorithms.losses import (
    ClipReason,
    LossInput,
    LossOptions,
    TokenLoss,
    gspo,
    loss_options,
    ppo_clip,
    smallest_before,
    tis,
)
from rollmesh.config.loss_methods import LOSSES


@dataclass(frozen=True, slots=True, kw_only=True)
class Ragged:
    """One minibatch as lists of floats."""

    logprobs: list[float]
    old: list[float]
    behavior: list[float]
    advantages: list[float]
    mask: list[bool]
    sequence: list[int]
    count: int

    def loss_input(self, dtype: torch.dtype = torch.float64) -> LossInput:
        """The same as tensors; ``logprobs`` requires a gradient."""
        return LossInput(
            logprobs=torch.tensor(self.logprobs, dtype=dtype, requires_grad=True),
            old_logprobs=torch.tensor(self.old, dtype=dtype),
            behavior_logprobs=torch.tensor(self.behavior, dtype=dtype),
            advantages=torch.tensor(self.advantages, dtype=dtype),
            mask=torch.tensor(self.mask),
            sequence_index=torch.tensor(self.sequence),
            sequence_count=self.count,
        )


def random_ragged(seed: int) -> Ragged:
    """1 to 6 sequences of 1 to 12 tokens; some ratios far off, some advantages 0, some tokens masked."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 7))
    sequence = np.repeat(np.arange(count), rng.integers(1, 13, count))
    n = len(sequence)
    logprobs = -rng.exponential(1.5, n)
    spread = rng.choice([0.01, 0.3, 3.0, 30.0])
    old = logprobs + rng.normal(0, spread, n)
    behavior = old + rng.normal(0, rng.choice([0.01, 0.5]), n)
    advantages = rng.choice([0.0, 1.0, -1.0], count) * rng.exponential(1.0, count)
    mask = rng.random(n) < 0.8
    return Ragged(
        logprobs=logprobs.tolist(),
        old=old.tolist(),
        behavior=behavior.tolist(),
        advantages=advantages[sequence].tolist(),
        mask=mask.tolist(),
        sequence=sequence.tolist(),
        count=count,
    )


def _clip(x: float, low: float, high: float) -> float:
    return min(max(x, low), high)


def _ratio(a: float, b: float) -> float:
    return math.exp(_clip(a - b, -20.0, 20.0))


TokenFormula = Callable[[float, int], float]
"""(log-probability of the token, its index) -> loss, everything under a stop-gradient held fixed."""


def ppo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        a, r = data.advantages[t], _ratio(x, data.old[t])
        value = -min(r * a, _clip(r, 1 - options.clip_low, 1 + options.clip_high) * a)
        if a < 0 and options.dual_clip is not None:
            value = min(value, -options.dual_clip * a)
        return value

    return loss


def decoupled_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    inner = ppo_formula(data, options)
    return lambda x, t: _ratio(data.old[t], data.behavior[t]) * inner(x, t)


def tis_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    inner = ppo_formula(data, options)
    return lambda x, t: min(_ratio(data.old[t], data.behavior[t]), options.tis_cap) * inner(x, t)


def gspo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        same = [j for j in range(len(data.sequence)) if data.sequence[j] == data.sequence[t]]
        mean = sum(data.logprobs[j] - data.old[j] for j in same if data.mask[j]) / len(same)
        s = math.exp(_clip(mean, -20.0, 20.0)) * math.exp(x - data.logprobs[t])
        a = data.advantages[t]
        return -min(s * a, _clip(s, 1 - options.clip_low, 1 + options.clip_high) * a)

    return loss


def cispo_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        fixed = _clip(_ratio(data.logprobs[t], data.old[t]), 1 - options.clip_low, 1 + options.clip_high)
        return -fixed * data.advantages[t] * x

    return loss


def minpro_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        earlier = [j for j in range(t) if data.sequence[j] == data.sequence[t]]
        ratios = [_ratio(data.logprobs[j], data.old[j]) if data.mask[j] else 1.0 for j in earlier]
        product = (min(ratios) if ratios else 1.0) * _ratio(data.logprobs[t], data.old[t])
        return -_clip(product, 1 - options.clip_low, 1 + options.clip_high) * data.advantages[t] * x

    return loss


def topr_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    def loss(x: float, t: int) -> float:
        a = data.advantages[t]
        return -a * x if a > 0 else -min(_ratio(data.logprobs[t], data.old[t]), 1.0) * a * x

    return loss


def kimi_formula(data: Ragged, options: LossOptions) -> TokenFormula:
    return lambda x, t: -data.advantages[t] * x + 0.05 * _clip(x - data.old[t], -20.0, 20.0) ** 2


FORMULAS: dict[str, Callable[[Ragged, LossOptions], TokenFormula]] = {
    "ppo_clip": ppo_formula,
    "decoupled_ppo": decoupled_formula,
    "tis": tis_formula,
    "gspo": gspo_formula,
    "cispo": cispo_formula,
    "minpro": minpro_formula,
    "topr": topr_formula,
    "kimi": kimi_formula,
}


SEEDS = range(40)
NAMES = sorted(LOSSES.methods)


def evaluate(name: str, data: LossInput, options: LossOptions) -> TokenLoss:
    """The loss with the defaults of its own options."""
    return LOSSES.bind(name, {})(data, options)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dual_clip", [None, 3.0])
def test_loss_equals_its_formula_on_random_ragged_inputs(name: str, dual_clip: float | None) -> None:
    for seed in SEEDS:
        data = random_ragged(seed)
        options = loss_options(LOSSES[name], dual_clip=dual_clip)
        formula = FORMULAS[name](data, options)
        got = evaluate(name, data.loss_input(), options).loss
        expected = torch.tensor([formula(x, t) for t, x in enumerate(data.logprobs)], dtype=torch.float64)
        keep = torch.tensor(data.mask)
        torch.testing.assert_close(got[keep], expected[keep], rtol=1e-9, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_gradient_equals_the_finite_difference_of_the_formula(name: str) -> None:
    step = 1e-6
    for seed in SEEDS:
        data = random_ragged(seed)
        options = loss_options(LOSSES[name], dual_clip=3.0)
        formula = FORMULAS[name](data, options)
        tensors = data.loss_input()
        (gradient,) = torch.autograd.grad(evaluate(name, tensors, options).loss.sum(), tensors.logprobs)
        for t, x in enumerate(data.logprobs):
            low, high = formula(x - step, t), formula(x + step, t)
            at_a_kink = abs(high - 2 * formula(x, t) + low) > 1e-9 * max(1.0, abs(high))
            if data.mask[t] and not at_a_kink:
                assert float(gradient[t]) == pytest.approx((high - low) / (2 * step), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_reported_weight_is_what_the_gradient_does_to_the_logprob(name: str) -> None:
    for seed in SEEDS:
        tensors = random_ragged(seed).loss_input()
        result = evaluate(name, tensors, loss_options(LOSSES[name], dual_clip=3.0))
        (gradient,) = torch.autograd.grad(result.loss.sum(), tensors.logprobs)
        if name == "kimi":
            # The weight is that of the first term; the square adds tau times the log-ratio.
            gradient = gradient - 0.1 * (tensors.logprobs - tensors.old_logprobs).detach()
        beyond = (tensors.logprobs - tensors.old_logprobs).abs() >= 20
        keep = tensors.mask & ~beyond
        torch.testing.assert_close(gradient[keep], (-result.weight * tensors.advantages)[keep], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_extreme_log_ratios_stay_finite_in_float32(name: str) -> None:
    data = random_ragged(0)
    tensors = data.loss_input(torch.float32)
    far = torch.where(torch.arange(len(data.old)) % 2 == 0, 500.0, -500.0)
    tensors.old_logprobs.copy_(tensors.logprobs.detach() + far)
    result = evaluate(name, tensors, loss_options(LOSSES[name]))
    (gradient,) = torch.autograd.grad(result.loss[tensors.mask].sum(), tensors.logprobs)
    assert torch.isfinite(result.loss).all() and torch.isfinite(gradient).all()


@pytest.mark.parametrize("name", NAMES)
def test_on_policy_every_ratio_is_one_and_nothing_is_clipped(name: str) -> None:
    tensors = random_ragged(3).loss_input()
    tensors.old_logprobs.copy_(tensors.logprobs.detach())
    tensors.behavior_logprobs.copy_(tensors.logprobs.detach())
    result = evaluate(name, tensors, loss_options(LOSSES[name], dual_clip=10.0))
    assert (result.ratio == 1).all() and (result.weight == 1).all() and (result.clip == ClipReason.NONE).all()


def test_clip_reasons_name_the_bound_that_cut_the_gradient() -> None:
    data = random_ragged(0)
    tensors = data.loss_input()
    logprobs = tensors.logprobs.detach()
    for advantage, log_ratio, reason in (
        (1.0, 0.5, ClipReason.HIGH),
        (1.0, -0.5, ClipReason.NONE),
        (-1.0, -0.5, ClipReason.LOW),
        (-1.0, 0.5, ClipReason.NONE),
        (-1.0, 1.5, ClipReason.DUAL),
    ):
        tensors.advantages.fill_(advantage)
        tensors.old_logprobs.copy_(logprobs - log_ratio)
        clip = ppo_clip(tensors, loss_options(LOSSES["ppo_clip"], dual_clip=3.0)).clip
        assert (clip == reason).all(), reason


def test_truncated_weight_is_reported_and_keeps_its_gradient() -> None:
    tensors = random_ragged(1).loss_input()
    tensors.advantages.fill_(1.0)
    tensors.old_logprobs.copy_(tensors.logprobs.detach())
    tensors.behavior_logprobs.copy_(tensors.logprobs.detach() - 2.0)
    result = tis(tensors, loss_options(LOSSES["tis"], tis_cap=2.0))
    assert (result.clip == ClipReason.TRUNCATED).all() and (result.weight == 2.0).all()


def test_the_smallest_ratio_before_a_token_is_that_of_its_own_sequence() -> None:
    values = torch.tensor([0.5, 2.0, 0.1, 3.0, 3.0, 0.2])
    got = smallest_before(values, torch.tensor([0, 0, 0, 1, 3, 3]), 4)
    torch.testing.assert_close(got, torch.tensor([1.0, 0.5, 0.5, 1.0, 1.0, 3.0]))
    assert smallest_before(torch.empty(0), torch.empty(0, dtype=torch.int64), 3).shape == (0,)


def test_minpro_needs_memory_for_its_tokens_only() -> None:
    # A table of 100,000 sequences, one of them of 400,000 tokens, would have 4e10 cells.
    index = torch.cat([torch.zeros(400_000, dtype=torch.int64), torch.tensor([99_999])])
    assert smallest_before(torch.full((400_001,), 0.5), index, 100_000).unique().tolist() == [0.5, 1.0]


def test_topr_cuts_the_weight_of_wrong_answers_only() -> None:
    tensors = random_ragged(1).loss_input()
    tensors.old_logprobs.copy_(tensors.logprobs.detach() - 1.0)
    for advantage, weight, clip in ((1.0, 1.0, ClipReason.NONE), (-1.0, 1.0, ClipReason.TRUNCATED)):
        tensors.advantages.fill_(advantage)
        result = evaluate("topr", tensors, loss_options(LOSSES["topr"]))
        assert (result.weight == weight).all() and (result.clip == clip).all()


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


def aggregated_by_hand(name: str, loss: list[float], mask: list[bool], original: list[bool], data: Ragged) -> float:
    kept = [x if m else 0.0 for x, m in zip(loss, mask, strict=True)]
    if name == "token_mean":
        return sum(kept) / max(1, sum(original))
    sequences: dict[int, list[int]] = {}
    for t, s in enumerate(data.sequence):
        if original[t]:
            sequences.setdefault(s, []).append(t)
    means = [sum(kept[t] for t in tokens) / len(tokens) for tokens in sequences.values()]
    return sum(means) / max(1, len(means))


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_aggregation_equals_its_formula_on_random_ragged_inputs(name: str) -> None:
    for seed in range(60):
        data = random_ragged(seed)
        rng = np.random.default_rng(1000 + seed)
        loss = rng.normal(size=len(data.sequence))
        original = rng.random(len(loss)) < 0.9
        mask = original & np.array(data.mask)
        weights = AGGREGATIONS[name](torch.from_numpy(original), torch.tensor(data.sequence), data.count)
        divided = weights / weights.sum().clamp(min=1)
        got = float(aggregate(torch.from_numpy(loss), torch.from_numpy(mask), divided))
        expected = aggregated_by_hand(name, loss.tolist(), mask.tolist(), original.tolist(), data)
        assert got == pytest.approx(expected, abs=1e-9)


def test_a_masked_token_may_carry_any_loss() -> None:
    original = torch.tensor([True, True])
    weights = AGGREGATIONS["token_mean"](original, torch.tensor([0, 0]), 1)
    loss = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert float(aggregate(loss, torch.tensor([True, False]), weights)) == 1.0


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_no_tokens_give_no_weight(name: str) -> None:
    weights = AGGREGATIONS[name](torch.tensor([False, False]), torch.tensor([0, 1]), 2)
    assert torch.equal(weights, torch.zeros(2, dtype=torch.float64))
