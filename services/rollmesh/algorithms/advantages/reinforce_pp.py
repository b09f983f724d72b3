"""REINFORCE++ advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns

EPSILON = 1e-6


def reinforce_pp(data: TrajectoryColumns) -> Tensor:
    """Subtract the batch's mean reward and divide by the batch's standard deviation; groups do not matter.

    ``A_i = (R_i - mean R) / (std R + 1e-6)`` over all trajectories of the batch, with the sample standard deviation
    (divisor N - 1); a batch of one trajectory gets 0. Returns float64 [trajectories]. Source: REINFORCE++
    (arXiv 2501.03262), without its KL term in the reward; the paper weights every token once, so long trajectories
    count more in its mean and deviation.
    """
    centred = data.rewards - data.rewards.mean()
    deviation = (centred.square().sum() / max(len(data.rewards) - 1, 1)).sqrt()
    return centred / (deviation + EPSILON)
