"""Dr.GRPO advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.segment_columns import segment_mean


def dr_grpo(rewards: Tensor, group_index: Tensor, group_count: int) -> Tensor:
    """Subtract the group's mean reward, without division: hard and easy prompts are not up-weighted.

    ``A_i = R_i - mean_g R``. ``rewards`` float [trajectories], ``group_index`` int64 [trajectories]; returns float
    [trajectories]. Source: Understanding R1-Zero-Like Training (arXiv 2503.20783).
    """
    return rewards - segment_mean(rewards, group_index, group_count)[group_index]
