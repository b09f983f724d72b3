"""Advantages by their name in the run file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from torch import Tensor

from rollmesh.algorithms.advantages.dr_grpo import dr_grpo
from rollmesh.algorithms.advantages.grpo import grpo
from rollmesh.algorithms.advantages.reinforce_pp import reinforce_pp
from rollmesh.algorithms.advantages.rloo import rloo

Advantage = Callable[[Tensor, Tensor, int], Tensor]
"""(rewards [trajectories], group_index [trajectories], group_count) -> advantages [trajectories]."""

ADVANTAGES: Mapping[str, Advantage] = MappingProxyType(
    {"grpo": grpo, "dr_grpo": dr_grpo, "rloo": rloo, "reinforce_pp": reinforce_pp}
)
