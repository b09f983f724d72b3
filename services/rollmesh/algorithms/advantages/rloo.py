"""Leave-one-out advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns


def rloo(data: TrajectoryColumns) -> Tensor:
    """Subtract the mean reward of the other members of the group.

    ``A_i = R_i - (sum_g R - R_i) / (n_g - 1)``; a group of one gets 0. Returns float64 [trajectories]. Source: Back to
    Basics (arXiv 2402.14740).
    """
    sizes = data.group_sizes()
    others = data.group_sum(data.rewards) - data.rewards
    return (data.rewards - others / (sizes - 1).clamp(min=1)) * (sizes > 1)
