"""Dr.GRPO advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns


def dr_grpo(data: TrajectoryColumns) -> Tensor:
    """Subtract the group's mean reward, without division: hard and easy prompts are not up-weighted.

    ``A_i = R_i - mean_g R``; float64 [trajectories]. Source: Understanding R1-Zero-Like Training (arXiv 2503.20783).
    """
    return data.rewards - data.group_mean(data.rewards)
