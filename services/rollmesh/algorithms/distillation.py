"""Learning from a teacher's log-probabilities of the policy's own tokens (docs/methods.md: Teachers)."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.aggregation import segment_count
from rollmesh.algorithms.ratios import k1


def reverse_kl_advantages(
    teacher: Tensor,
    behavior: Tensor,
    sequence_index: Tensor,
    sequence_count: int,
    *,
    coefficient: float,
    discount: float,
) -> Tensor:
    """Return ``coefficient * sum_{s >= t} discount^(s - t) (log pi_teacher(a_s) - log mu(a_s))``; [tokens].

    ``teacher`` and ``behavior`` are log-probabilities of the tokens that a policy wrote, ``sequence_index`` int64 their
    sequences, each contiguous and in order; all [tokens]. Log-ratios are clamped to [-20, 20].
    """
    rewards = -coefficient * k1(behavior, teacher)
    if not discount:
        return rewards
    ends = segment_count(sequence_index, sequence_count).cumsum(0)
    after = ends[sequence_index] - 1 - torch.arange(len(rewards), device=rewards.device)
    total, sums = rewards.new_zeros(sequence_count), torch.empty_like(rewards)
    # One place from the end at a time, for all sequences that are long enough.
    for rows in torch.split(after.argsort(stable=True), torch.bincount(after).tolist()):
        sequences = sequence_index[rows]
        sums[rows] = total[sequences] = rewards[rows] + discount * total[sequences]
    return sums
