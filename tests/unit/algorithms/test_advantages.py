"""Advantages equal their formulas over groups of any size, and the known answers of their sources."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from rollmesh.algorithms.advantages import (
    dr_grpo,
    drpo,
    filtered_bc,
    grpo,
    in_kept_pairs,
    length_rewards,
    length_weights,
    mc_grpo,
    novelty_bonus,
    reinforce_pp,
    tba,
)
from rollmesh.config.advantage_methods import ADVANTAGES

from .random_trajectories import OF_BATCHES, OF_GROUPS, by_hand, columns, random_columns

CENTRED = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "grpo_lambda", "tba")


@pytest.mark.parametrize("name", sorted(ADVANTAGES.methods))
def test_an_advantage_equals_its_formula_on_ragged_groups_in_any_order(name: str) -> None:
    for seed in range(60):
        data = random_columns(seed, graded=bool(seed % 2))
        expected, options = by_hand(name, data)
        got = ADVANTAGES.bind(name, options)(data)
        assert got.dtype is torch.float64
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-6, atol=1e-6)


def test_every_advantage_has_a_formula_to_be_compared_with() -> None:
    assert {*OF_GROUPS, *OF_BATCHES} == set(ADVANTAGES.methods)


@pytest.mark.parametrize("name", sorted(set(ADVANTAGES.methods) - {"filtered_bc", "grpo_lambda", "reinforce_pp"}))
def test_equal_rewards_and_lonely_trajectories_have_no_advantage(name: str) -> None:
    data = columns([1.0, 1.0, 1.0, 5.0], [0, 0, 0, 1])
    assert (ADVANTAGES.bind(name, OF_GROUPS[name][1])(data) == 0).all()


def test_a_batch_of_equal_rewards_has_no_advantage() -> None:
    assert reinforce_pp(columns([0.1] * 7, range(7))).abs().max() < 1e-9
    assert reinforce_pp(columns([0.1])).tolist() == [0.0]


@pytest.mark.parametrize("name", CENTRED)
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    data = columns([0.0, 1.0, 1.0, 0.25, 0.75], lengths=[3, 9, 4, 2, 7], policy=[-3.0, -1.0, -2.0, -5.0, -4.0])
    options = (OF_GROUPS | OF_BATCHES)[name][1]
    assert abs(float(ADVANTAGES.bind(name, options)(data).sum())) < 1e-9


def test_grpo_without_a_norm_is_dr_grpo() -> None:
    for seed in range(10):
        data = random_columns(seed, graded=True)
        centred = dr_grpo(data)
        assert torch.equal(grpo(data, norm="none"), centred)
        assert torch.equal(grpo(data, norm="group_std"), grpo(data))


def test_mc_grpo_gives_the_known_answers_and_clips_unless_told_otherwise() -> None:
    binary, graded = columns([0.0, 0.0, 0.0, 0.0, 1.0]), columns([0.0, 0.25, 0.5, 0.75, 1.0])
    assert mc_grpo(binary, adv_clip=None).tolist() == pytest.approx([0, 0, 0, 0, 5000.0])
    expected = pytest.approx([-2.49, -1.245, 0.0, 1.245, 2.49], abs=5e-4)
    assert mc_grpo(graded, adv_clip=None).tolist() == expected
    assert mc_grpo(binary, adv_clip=5.0).tolist() == [0, 0, 0, 0, 5.0]


def test_grpo_lambda_rewards_are_the_known_answer() -> None:
    data = columns([1.0, 1.0, 1.0, 0.0], lengths=[100, 200, 300, 400])
    rewards = length_rewards(data, top_share=0.2, alpha=0.6)
    assert rewards.tolist() == pytest.approx([0.8637, 0.7, 0.5363, 0.0], abs=5e-5)


def test_grpo_lambda_pays_for_length_in_the_best_groups_only() -> None:
    data = columns([1.0, 1.0, 0.0, 1.0, 0.0, 0.0], [0, 0, 0, 1, 1, 1], lengths=[5, 9, 5, 5, 9, 5])
    rewards = length_rewards(data, top_share=0.5, alpha=0.6)
    assert rewards[0] > rewards[1] and rewards[3:].tolist() == [1.0, 0.0, 0.0]


def test_drpo_length_weights_are_the_known_answer() -> None:
    weights = length_weights(torch.tensor([1024, 4096, 8192]), longest_tokens=8192, length_scale=0.1)
    assert weights.tolist() == pytest.approx([0.976871, 0.022974, 0.000155], abs=5e-7)


def test_drpo_is_the_gradient_of_its_objective() -> None:
    data = columns([1.0, 1.0, 0.0, 0.0], lengths=[10, 20, 15, 5], policy=[-4.0, -30.0, -20.0, -1.0])
    assert data.policy_logprob_sums is not None
    means = (data.policy_logprob_sums / data.lengths).requires_grad_()
    weights = length_weights(data.lengths[:2], longest_tokens=40, length_scale=0.5)
    objective = (weights * means[:2]).sum() - 3 * (means[2:] / 3).exp().mean().log()
    (gradient,) = torch.autograd.grad(objective, means)
    got = drpo(data, longest_tokens=40, length_scale=0.5, tau=3.0)
    torch.testing.assert_close(got / 4, gradient, rtol=1e-12, atol=1e-12)


def test_pairs_keep_the_known_answers() -> None:
    advantages = torch.tensor([1.5, 1.2, 0.3, 0.1, -0.1, -0.4, -1.1, -1.5])
    kept = in_kept_pairs(advantages, torch.zeros(8, dtype=torch.int64), 1, kept=0.5)
    torch.testing.assert_close(advantages[kept], torch.tensor([1.5, 1.2, -1.1, -1.5]))


def test_a_share_of_29_in_100_keeps_29() -> None:
    group = torch.zeros(200, dtype=torch.int64)
    assert int(in_kept_pairs(torch.arange(200.0), group, 1, kept=0.29).sum()) == 2 * 29
    right = columns([1.0] * 200, [i // 2 for i in range(200)], lengths=[1, 3] * 100)
    paid = length_rewards(right, top_share=0.29, alpha=0.6) < 1
    assert int(paid.sum()) == 2 * 29


def test_xrpo_novelty_gives_the_known_answer() -> None:
    base = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    data = columns([1.0, 1.0, 0.0, 0.0], behavior=[-0.9, -0.3, -0.5, -0.5])
    got = base + novelty_bonus(data, base, novelty=2.5, cap=0.5)
    assert got.tolist() == pytest.approx([1.5, 1.0, -1.0, -1.0])


def test_tba_is_the_gradient_of_trajectory_balance() -> None:
    data = columns([1.0, 0.0, 0.5], policy=[-3.0, -8.0, -2.0], reference=[-4.0, -7.0, -2.5])
    assert data.policy_logprob_sums is not None and data.reference_logprob_sums is not None
    sums, beta = data.policy_logprob_sums.clone().requires_grad_(), 0.25
    log_z = (data.reference_logprob_sums - sums + data.rewards / beta).mean().detach()
    loss = (log_z + sums - data.reference_logprob_sums - data.rewards / beta).square().sum()
    (gradient,) = torch.autograd.grad(loss, sums)
    torch.testing.assert_close(tba(data, beta=beta), -beta / 2 * gradient, rtol=1e-12, atol=1e-12)


def test_a_trajectory_without_a_verdict_is_solved_by_its_reward() -> None:
    data = columns([0.5, 0.0, -1.0, 1.0], outcomes=[float("nan"), float("nan"), 1.0, 0.0])
    assert filtered_bc(data).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert dataclasses.replace(data, outcome_values=data.rewards).solved.tolist() == [True, False, False, True]
