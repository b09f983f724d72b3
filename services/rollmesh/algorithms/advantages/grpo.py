"""GRPO advantage."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns

EPSILON = 1e-6


def grpo(data: TrajectoryColumns, *, norm: str | None = None) -> Tensor:
    """Subtract the group's mean reward and divide by the group's standard deviation, or by 1 with ``norm`` none.

    ``A_i = (R_i - mean_g R) / (std_g R + 1e-6)`` with the sample standard deviation (divisor n - 1); groups may have
    any size, a group of one gets 0. Returns float64 [trajectories]. Source: DeepSeekMath (arXiv 2402.03300); the
    divisor n - 1 is that of CoPRIS's code.
    """
    centred = data.rewards - data.group_mean(data.rewards)
    if norm == "none":
        return centred
    variance = data.group_sum(centred.square()) / (data.group_sizes() - 1).clamp(min=1)
    return centred / (variance.sqrt() + EPSILON)
