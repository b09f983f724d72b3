"""Leave-one-out advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.segment_columns import segment_count, segment_sum


def rloo(rewards: Tensor, group_index: Tensor, group_count: int) -> Tensor:
    """Subtract the mean reward of the other members of the group.

    ``A_i = R_i - (sum_g R - R_i) / (n_g - 1)``; a group of one gets 0. ``rewards`` float [trajectories],
    ``group_index`` int64 [trajectories]; returns float [trajectories]. Source: Back to Basics (arXiv 2402.14740).
    """
    sizes = segment_count(group_index, group_count)[group_index]
    others = segment_sum(rewards, group_index, group_count)[group_index] - rewards
    return (rewards - others / (sizes - 1).clamp(min=1)) * (sizes > 1)
