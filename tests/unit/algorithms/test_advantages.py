"""Advantages equal their formulas over groups of any size."""

import statistics

import numpy as np
import pytest
import torch

from rollmesh.algorithms.advantages.advantage_registry import ADVANTAGES
from rollmesh.config.trainer import BATCH_ADVANTAGES

OF_GROUPS = sorted(ADVANTAGES.keys() - set(BATCH_ADVANTAGES))


def by_hand(name: str, rewards: list[float]) -> list[float]:
    n, mean = len(rewards), statistics.fmean(rewards)
    if name == "dr_grpo":
        return [r - mean for r in rewards]
    if name == "rloo":
        return [r - (sum(rewards) - r) / (n - 1) if n > 1 else 0.0 for r in rewards]
    deviation = statistics.stdev(rewards) if n > 1 else 0.0
    return [(r - mean) / (deviation + 1e-6) for r in rewards]


@pytest.mark.parametrize("name", OF_GROUPS)
def test_advantage_equals_its_formula_on_ragged_groups_in_any_order(name: str) -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        sizes = rng.integers(1, 9, rng.integers(1, 7))
        index = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
        rewards = rng.choice([0.0, 1.0, 0.5], len(index)) + rng.normal(0, rng.choice([0.0, 1.0]), len(index))
        got = ADVANTAGES[name](torch.from_numpy(rewards), torch.from_numpy(index), len(sizes)).numpy()
        for g in range(len(sizes)):
            np.testing.assert_allclose(
                got[index == g], by_hand(name, rewards[index == g].tolist()), rtol=1e-6, atol=1e-6
            )


def test_reinforce_pp_equals_its_formula_over_the_whole_batch_whatever_the_groups() -> None:
    for seed in range(60):
        rng = np.random.default_rng(seed)
        size = int(rng.integers(1, 40))
        rewards = rng.choice([0.0, 1.0, 0.5], size) + rng.normal(0, rng.choice([0.0, 1.0]), size)
        index = rng.integers(0, size, size)
        got = ADVANTAGES["reinforce_pp"](torch.from_numpy(rewards), torch.from_numpy(index), size)
        exact = rewards.tolist()
        mean, deviation = statistics.fmean(exact), statistics.stdev(exact) if size > 1 else 0.0
        expected = [(reward - mean) / (deviation + 1e-6) for reward in exact]
        np.testing.assert_allclose(got.numpy(), expected, rtol=1e-9, atol=1e-9)
        assert got.dtype is torch.float64


@pytest.mark.parametrize("name", OF_GROUPS)
def test_equal_rewards_and_lonely_trajectories_have_no_advantage(name: str) -> None:
    rewards, index = torch.tensor([1.0, 1.0, 1.0, 5.0]), torch.tensor([0, 0, 0, 1])
    assert (ADVANTAGES[name](rewards, index, 2) == 0).all()


def test_a_batch_of_equal_rewards_has_no_advantage() -> None:
    rewards, index = torch.full((7,), 0.1, dtype=torch.float64), torch.arange(7)
    assert ADVANTAGES["reinforce_pp"](rewards, index, 7).abs().max() < 1e-9
    assert ADVANTAGES["reinforce_pp"](rewards[:1], index[:1], 1).tolist() == [0.0]


@pytest.mark.parametrize("name", sorted(ADVANTAGES))
def test_advantages_of_a_group_sum_to_zero(name: str) -> None:
    rewards = torch.tensor([0.0, 1.0, 1.0, 0.25, 0.75], dtype=torch.float64)
    total = ADVANTAGES[name](rewards, torch.zeros(5, dtype=torch.int64), 1).sum()
    assert abs(float(total)) < 1e-9
