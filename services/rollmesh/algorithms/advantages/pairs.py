"""Shuffle-R1's pairs: only the answers that differ most are trained on."""

from __future__ import annotations

import torch
from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns
from rollmesh.algorithms.advantages.grpo import grpo


def pairs(data: TrajectoryColumns, *, kept: float) -> Tensor:
    """Return the GRPO advantage of the members of the kept pairs, 0 for the others; float64 [trajectories].

    Source: Shuffle-R1, from a fork.
    """
    advantages = grpo(data)
    return advantages * in_kept_pairs(advantages, data.group_index, data.group_count, kept=kept)


def in_kept_pairs(advantages: Tensor, group_index: Tensor, group_count: int, *, kept: float) -> Tensor:
    """Pair the largest advantage of a group with its smallest, and so on; keep the first ``kept`` of the pairs.

    At least one pair of a group is kept, otherwise the number is rounded down. Equal advantages are in the order of the
    batch; the middle member of an odd group has no pair. Returns bool [trajectories].
    """
    keep = torch.zeros_like(advantages, dtype=torch.bool)
    for group in range(group_count):
        members = torch.nonzero(group_index == group).flatten()
        order = members[advantages[members].argsort(descending=True, stable=True)]
        if count := len(members) // 2:
            # 0.29 * 100 is a little below 29 in floating point.
            count = max(1, int(kept * count + 1e-9))
            keep[order[:count]] = True
            keep[order[-count:]] = True
    return keep
