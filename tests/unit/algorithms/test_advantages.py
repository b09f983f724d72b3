"""Advantages equal formulas written out in plain floats, over groups of any size, and the known answers of sources."""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.algorithms.advantages import (
    TrajectoryColumns,
    dr_grpo,
    filtered_bc,
    grpo,
    in_kept_pairs,
    length_rewards,
    length_weights,
    mc_grpo,
    novelty_bonus,
)
from rollmesh.config.advantage_methods import ADVANTAGES


def columns(
    rewards: Sequence[float],
    groups: Sequence[int] | None = None,
    *,
    lengths: Sequence[int] | None = None,
    behavior: Sequence[float] | None = None,
    policy: Sequence[float] | None = None,
    reference: Sequence[float] | None = None,
    outcomes: Sequence[float] | None = None,
) -> TrajectoryColumns:
    """Trajectories of one group unless ``groups`` is given, of one token each; the outcome is the reward."""
    count = len(rewards)
    index = [0] * count if groups is None else list(groups)

    def floats(values: Sequence[float] | None) -> torch.Tensor:
        return torch.tensor([0.0] * count if values is None else list(values), dtype=torch.float64)

    return TrajectoryColumns(
        rewards=floats(rewards),
        outcome_values=floats(rewards if outcomes is None else outcomes),
        group_index=torch.tensor(index, dtype=torch.int64),
        group_count=max(index) + 1,
        lengths=torch.tensor([1] * count if lengths is None else list(lengths)),
        truncated=torch.zeros(count, dtype=torch.bool),
        behavior_logprob_sums=floats(behavior),
        policy_logprob_sums=floats(policy),
        reference_logprob_sums=floats(reference),
    )


def random_columns(seed: int, *, graded: bool = False) -> TrajectoryColumns:
    """1 to 6 groups of 1 to 8 trajectories in any order, some equal lengths, some outcomes missing."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 9, rng.integers(1, 7))
    index = rng.permutation(np.repeat(np.arange(len(sizes)), sizes))
    count = len(index)
    rewards = rng.choice([0.0, 1.0], count) + (rng.normal(0, 1, count) if graded else 0.0)
    lengths = rng.integers(1, rng.choice([3, 2000]), count)
    return columns(
        rewards.tolist(),
        index.tolist(),
        lengths=lengths.tolist(),
        behavior=(-rng.exponential(0.5, count) * lengths).tolist(),
        policy=(-rng.exponential(0.5, count) * lengths).tolist(),
        reference=(-rng.exponential(0.5, count) * lengths).tolist(),
        outcomes=np.where(rng.random(count) < 0.2, np.nan, rewards).tolist(),
    )


Group = list[dict[str, float]]


def groups_of(data: TrajectoryColumns) -> list[Group]:
    """The members of every group, each with its columns and its place in the batch."""
    rows: list[dict[str, float]] = []
    for i in range(len(data.rewards)):
        reward, outcome = float(data.rewards[i]), float(data.outcome_values[i])
        assert data.policy_logprob_sums is not None and data.reference_logprob_sums is not None
        rows.append(
            {
                "place": i,
                "group": int(data.group_index[i]),
                "reward": reward,
                "right": float((reward if math.isnan(outcome) else outcome) > 0),
                "length": float(data.lengths[i]),
                "behavior": float(data.behavior_logprob_sums[i]),
                "policy": float(data.policy_logprob_sums[i]),
                "reference": float(data.reference_logprob_sums[i]),
            }
        )
    return [[row for row in rows if row["group"] == g] for g in range(data.group_count)]


def _grpo(rewards: list[float]) -> list[float]:
    deviation = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(r - statistics.fmean(rewards)) / (deviation + 1e-6) for r in rewards]


def _rewards(group: Group) -> list[float]:
    return [row["reward"] for row in group]


def _dr_grpo(group: Group) -> list[float]:
    return [r - statistics.fmean(_rewards(group)) for r in _rewards(group)]


def _rloo(group: Group) -> list[float]:
    rewards = _rewards(group)
    n = len(rewards)
    return [r - (sum(rewards) - r) / (n - 1) if n > 1 else 0.0 for r in rewards]


def _mc_grpo(group: Group, *, adv_clip: float | None) -> list[float]:
    rewards = _rewards(group)
    middle = statistics.median_low(rewards)
    spread = statistics.median_low([abs(r - middle) for r in rewards]) + 1e-3
    moved = max(1, sum(r != middle for r in rewards))
    values = [(r - middle) / spread * len(rewards) / moved for r in rewards]
    return values if adv_clip is None else [min(max(v, -adv_clip), adv_clip) for v in values]


def _drpo(group: Group, *, longest_tokens: int, length_scale: float, tau: float) -> list[float]:
    right, wrong = [row for row in group if row["right"]], [row for row in group if not row["right"]]
    if not right or not wrong:
        return [0.0] * len(group)
    short = sum(math.exp((1 - row["length"] / longest_tokens) / length_scale) for row in right)
    likely = sum(math.exp(row["policy"] / row["length"] / tau) for row in wrong)
    return [
        len(group) * math.exp((1 - row["length"] / longest_tokens) / length_scale) / short
        if row["right"]
        else -len(group) * math.exp(row["policy"] / row["length"] / tau) / likely
        for row in group
    ]


def _xrpo_novelty(group: Group, *, novelty: float, cap: float) -> list[float]:
    means = [row["behavior"] / row["length"] for row in group]
    values = []
    for row, mean, a in zip(group, means, _grpo(_rewards(group)), strict=True):
        rare = max(novelty * (1 - math.exp(mean - statistics.fmean(means))), 0.0)
        values.append(a + min(rare, cap * a) if row["right"] and a > 0 else a)
    return values


def _pairs(group: Group, *, kept: float) -> list[float]:
    values = _grpo(_rewards(group))
    order = sorted(range(len(values)), key=lambda i: -values[i])
    count = max(1, math.floor(kept * (len(values) // 2) + 1e-9)) if len(values) > 1 else 0
    chosen = {*order[:count], *order[len(order) - count :]}
    return [a if i in chosen else 0.0 for i, a in enumerate(values)]


def _filtered_bc(group: Group) -> list[float]:
    return [row["right"] for row in group]


def _tba(group: Group, *, beta: float) -> list[float]:
    """-beta / 2 times the derivative of TBA's loss with respect to each sequence log-probability."""
    log_z = statistics.fmean([row["reference"] - row["policy"] + row["reward"] / beta for row in group])
    return [-beta * (log_z + row["policy"] - row["reference"] - row["reward"] / beta) for row in group]


OF_GROUPS: dict[str, tuple[Callable[..., list[float]], dict[str, Any]]] = {
    "grpo": (lambda group: _grpo(_rewards(group)), {}),
    "dr_grpo": (_dr_grpo, {}),
    "rloo": (_rloo, {}),
    "mc_grpo": (_mc_grpo, {"adv_clip": 5.0}),
    "drpo": (_drpo, {"longest_tokens": 2000, "length_scale": 0.1, "tau": 10.0}),
    "xrpo_novelty": (_xrpo_novelty, {"novelty": 2.5, "cap": 0.5}),
    "pairs": (_pairs, {"kept": 0.5}),
    "filtered_bc": (_filtered_bc, {}),
    "tba": (_tba, {"beta": 0.05}),
}
"""Advantages of one group, with the options that they are tested with."""


def _reinforce_pp(batch: list[Group]) -> dict[int, float]:
    rows = [row for group in batch for row in group]
    mean = statistics.fmean(row["reward"] for row in rows)
    deviation = statistics.stdev(row["reward"] for row in rows) if len(rows) > 1 else 0.0
    return {int(row["place"]): (row["reward"] - mean) / (deviation + 1e-6) for row in rows}


def _grpo_lambda(batch: list[Group], *, top_share: float, alpha: float) -> dict[int, float]:
    found = sorted((g for g in batch if g), key=lambda g: -statistics.fmean(row["right"] for row in g))
    top = found[: max(1, math.floor(top_share * len(found) + 1e-9))]
    values: dict[int, float] = {}
    for group in found:
        lengths = [row["length"] for row in group if row["right"]]
        spread = statistics.pstdev(lengths) if lengths else 0.0
        rewards = []
        for row in group:
            offset = (row["length"] - statistics.fmean(lengths)) / (spread or 1.0) if row["right"] else 0.0
            paid = 1 - alpha / (1 + math.exp(-offset)) if any(group is g for g in top) else 1.0
            rewards.append(paid if row["right"] else 0.0)
        values |= {int(row["place"]): a for row, a in zip(group, _grpo(rewards), strict=True)}
    return values


OF_BATCHES: dict[str, tuple[Callable[..., dict[int, float]], dict[str, Any]]] = {
    "reinforce_pp": (_reinforce_pp, {}),
    "grpo_lambda": (_grpo_lambda, {"top_share": 0.4, "alpha": 0.6}),
}
"""Advantages of a whole batch, by place."""


def by_hand(name: str, data: TrajectoryColumns) -> tuple[list[float], dict[str, Any]]:
    """The advantages of a batch and the options that they are computed with."""
    batch = groups_of(data)
    if name in OF_BATCHES:
        formula, options = OF_BATCHES[name]
        values = formula(batch, **options)
    else:
        of_group, options = OF_GROUPS[name]
        values = {}
        for group in batch:
            members = of_group(group, **options) if group else []
            values |= {int(row["place"]): a for row, a in zip(group, members, strict=True)}
    return [values[i] for i in range(len(data.rewards))], options


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


def test_a_trajectory_without_a_verdict_is_solved_by_its_reward() -> None:
    data = columns([0.5, 0.0, -1.0, 1.0], outcomes=[float("nan"), float("nan"), 1.0, 0.0])
    assert filtered_bc(data).tolist() == [1.0, 0.0, 1.0, 0.0]
    assert dataclasses.replace(data, outcome_values=data.rewards).solved.tolist() == [True, False, False, True]


def test_grpo_without_a_norm_is_dr_grpo() -> None:
    for seed in range(10):
        data = random_columns(seed, graded=True)
        assert torch.equal(grpo(data, norm="none"), dr_grpo(data))
        assert torch.equal(grpo(data, norm="group_std"), grpo(data))
