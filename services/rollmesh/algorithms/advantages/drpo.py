"""DRPO advantage: right answers weigh by length, wrong ones by probability."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns


def drpo(data: TrajectoryColumns, *, longest_tokens: int, length_scale: float, tau: float) -> Tensor:
    """Return the weights with which DRPO pushes the mean log-probability of each answer.

    DRPO maximizes ``sum_right w_i s_i - tau log mean_wrong exp(s_j / tau)`` per group, with ``s`` the mean
    log-probability per token and ``w`` of ``length_weights``. Its gradient weighs a right answer by ``w_i``, a wrong
    one by ``-softmax_wrong(s / tau)_j``. The advantages are these weights times the size of the group, so that
    ``sequence_mean_token_mean`` gives the mean over equal groups. A group without a right and a wrong answer gets 0.
    Returns float64 [trajectories]. Source: code of DRPO.
    """
    assert data.policy_logprob_sums is not None
    means = data.policy_logprob_sums / data.lengths.clamp(min=1)
    solved = data.solved
    advantages = torch.zeros_like(data.rewards)
    for group in range(data.group_count):
        member = data.group_index == group
        right, wrong = member & solved, member & ~solved
        if not right.any() or not wrong.any():
            continue
        size = int(member.sum())
        weights = length_weights(data.lengths[right], longest_tokens=longest_tokens, length_scale=length_scale)
        advantages[right] = size * weights
        advantages[wrong] = -size * torch.softmax(means[wrong] / tau, 0)
    return advantages


def length_weights(lengths: Tensor, *, longest_tokens: int, length_scale: float) -> Tensor:
    """Return ``exp((1 - L / C) / Lambda)``, divided by its sum; ``lengths`` int64 [answers], float64 [answers]."""
    return torch.softmax((1 - lengths.double() / longest_tokens) / length_scale, 0)
