"""MC-GRPO advantage: centred on the median."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns

EPSILON = 1e-3


def mc_grpo(data: TrajectoryColumns, *, adv_clip: float | None) -> Tensor:
    """Subtract the group's median reward and divide by the median absolute deviation.

    ``A_i = (R_i - med_g) / (median_g |R - med_g| + 1e-3) * n_g / #{A != 0}``, then clamped to [-adv_clip, adv_clip]
    unless None. In a group of an even size the median is the lower one of the two in the middle, so that one member is
    always the pivot with advantage 0. Returns float64 [trajectories]. Source: code of MC-GRPO, which samples G + 1
    members and leaves the pivot out of the update.
    """
    advantages = torch.zeros_like(data.rewards)
    for group in range(data.group_count):
        member = data.group_index == group
        rewards = data.rewards[member]
        if not len(rewards):
            continue
        centred = rewards - rewards.median()
        values = centred / (centred.abs().median() + EPSILON)
        advantages[member] = values * len(values) / max(1, int((values != 0).sum()))
    return advantages if adv_clip is None else advantages.clamp(-adv_clip, adv_clip)
