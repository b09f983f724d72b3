"""GRPO advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.segment_columns import segment_count, segment_mean, segment_sum

EPSILON = 1e-6


def grpo(rewards: Tensor, group_index: Tensor, group_count: int) -> Tensor:
    """Subtract the group's mean reward and divide by the group's standard deviation.

    ``A_i = (R_i - mean_g R) / (std_g R + 1e-6)`` with the sample standard deviation (divisor n - 1); groups may have
    any size, a group of one gets 0. ``rewards`` float [trajectories], ``group_index`` int64 [trajectories];
    returns float [trajectories]. Source: DeepSeekMath (arXiv 2402.03300); the divisor n - 1 is that of CoPRIS's code.
    """
    sizes = segment_count(group_index, group_count)
    centred = rewards - segment_mean(rewards, group_index, group_count)[group_index]
    variance = segment_sum(centred.square(), group_index, group_count) / (sizes - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)[group_index]
