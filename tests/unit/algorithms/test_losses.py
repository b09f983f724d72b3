"""Losses equal their formulas, their gradients equal what the formulas' derivatives say."""

import pytest
import torch

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

from .ragged import FORMULAS, random_ragged

SEEDS = range(40)
NAMES = sorted(LOSSES.methods)


def evaluate(name: str, data: LossInput, options: LossOptions) -> TokenLoss:
    """The loss with the defaults of its own options."""
    result: TokenLoss = LOSSES.bind(name, {})(data, options)
    return result


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


def test_gspo_ratio_is_shared_by_a_sequence_and_ignores_masked_tokens() -> None:
    data = random_ragged(5)
    tensors = data.loss_input()
    before = gspo(tensors, loss_options(LOSSES["gspo"])).ratio
    tensors.old_logprobs[~tensors.mask] += 7.0
    after = gspo(tensors, loss_options(LOSSES["gspo"])).ratio
    torch.testing.assert_close(before, after)
    for s in range(data.count):
        assert len(before[tensors.sequence_index == s].unique()) == 1


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
