"""GRPO-lambda advantage: short answers are favoured in the groups that are solved best."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns
from rollmesh.algorithms.advantages.grpo import grpo


def grpo_lambda(data: TrajectoryColumns, *, top_share: float, alpha: float) -> Tensor:
    """Compute the GRPO advantage of the rewards of ``length_rewards``; float64 [trajectories].

    Source: GRPO-lambda, from descriptions.
    """
    return grpo(replace(data, rewards=length_rewards(data, top_share=top_share, alpha=alpha)))


def length_rewards(data: TrajectoryColumns, *, top_share: float, alpha: float) -> Tensor:
    """Return 1 for right and 0 for wrong answers; in the top groups ``1 - alpha sigmoid((L - mean) / std)`` for right.

    The top groups are the ``top_share`` of the groups with the largest share of right answers, rounded down but at
    least one; of equal groups the first one in the batch. Mean and population standard deviation of the tokens ``L``
    are those of the right answers of the group; equal lengths give ``1 - alpha / 2``. Returns float64 [trajectories].
    """
    solved = data.solved
    right = solved.double()
    present = torch.unique(data.group_index)
    accuracy = torch.stack([right[data.group_index == group].mean() for group in present])
    ranked = present[accuracy.argsort(descending=True, stable=True)]
    rewards = right.clone()
    # 0.29 * 100 is a little below 29 in floating point.
    for group in ranked[: max(1, int(top_share * len(present) + 1e-9))]:
        member = (data.group_index == group) & solved
        if not member.any():
            continue
        lengths = data.lengths[member].double()
        spread = lengths.std(correction=0)
        offsets = (lengths - lengths.mean()) / torch.where(spread > 0, spread, 1.0)
        rewards[member] = 1 - alpha * offsets.sigmoid()
    return rewards
