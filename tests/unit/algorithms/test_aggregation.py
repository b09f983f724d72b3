"""Masking changes the numerator only; denominators count the original tokens."""

import numpy as np
import pytest
import torch

from rollmesh.algorithms.aggregation import AGGREGATIONS, aggregate

from .ragged import Ragged, random_ragged


def by_hand(name: str, loss: list[float], mask: list[bool], original: list[bool], data: Ragged) -> float:
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
        expected = by_hand(name, loss.tolist(), mask.tolist(), original.tolist(), data)
        assert got == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_masking_a_token_leaves_the_weight_of_every_other_token(name: str) -> None:
    original = torch.tensor([True, True, True, True, False, True])
    index = torch.tensor([0, 0, 0, 1, 1, 1])
    weights = AGGREGATIONS[name](original, index, 2)
    loss = torch.arange(6, dtype=torch.float64, requires_grad=True)
    mask = original & torch.tensor([True, False, True, True, True, True])
    (gradient,) = torch.autograd.grad(aggregate(loss, mask, weights), loss)
    assert torch.equal(gradient, weights * mask)


def test_a_masked_token_may_carry_any_loss() -> None:
    original = torch.tensor([True, True])
    weights = AGGREGATIONS["token_mean"](original, torch.tensor([0, 0]), 1)
    loss = torch.tensor([1.0, float("nan")], dtype=torch.float64)
    assert float(aggregate(loss, torch.tensor([True, False]), weights)) == 1.0


@pytest.mark.parametrize("name", sorted(AGGREGATIONS))
def test_no_tokens_give_no_weight(name: str) -> None:
    weights = AGGREGATIONS[name](torch.tensor([False, False]), torch.tensor([0, 1]), 2)
    assert torch.equal(weights, torch.zeros(2, dtype=torch.float64))
