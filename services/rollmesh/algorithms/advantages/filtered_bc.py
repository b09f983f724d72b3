"""Filtered behavior cloning: right answers are imitated, others ignored."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.advantages.advantage_protocol import TrajectoryColumns


def filtered_bc(data: TrajectoryColumns) -> Tensor:
    """Return 1 for a right answer and 0 for any other; float64 [trajectories]. Source: code of TTI."""
    return data.solved.double()
