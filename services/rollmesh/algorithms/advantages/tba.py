"""Trajectory balance with the VarGrad estimate of the partition function."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns


def tba(data: TrajectoryColumns, *, beta: float) -> Tensor:
    """Return ``A_i = R_i - mean_g R - beta (d_i - mean_g d)`` with ``d = log pi(y) - log pi_ref(y)``, sums over tokens.

    The loss of TBA is ``(log Z + d_i - R_i / beta)^2`` with ``log Z = sg[mean_g(R / beta - d)]``; its gradient is that
    of ``-2 / beta A_i log pi(y_i)``. Returns float64 [trajectories]. Source: TBA (arXiv 2503.18929).
    """
    assert data.policy_logprob_sums is not None and data.reference_logprob_sums is not None
    energy = data.rewards - beta * (data.policy_logprob_sums - data.reference_logprob_sums)
    return energy - data.group_mean(energy)
