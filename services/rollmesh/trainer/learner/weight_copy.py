"""Copy of the weights in host memory, from which a policy is written while the next step changes the weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rollmesh.trainer.learner.distributed import World, gathered


class WeightCopy:
    """Weights in the publishing dtype, by their published names; pinned memory if the weights are on a GPU.

    The memory is reused for every version: fresh pages would cost more time than the copy.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: dict[str, Tensor] = {}

    @torch.no_grad()
    def take(self, weights: Mapping[str, Tensor], world: World) -> Mapping[str, Tensor]:
        """Copy the current weights and return the copy, which the next call overwrites; empty except on rank 0.

        Every rank must call it: the shards of one parameter at a time are gathered.
        """
        for name, weight in weights.items():
            value = gathered(weight)
            if not world.leads:
                continue
            if name not in self._weights:
                self._weights[name] = torch.empty(value.shape, dtype=self._dtype, pin_memory=value.is_cuda)
            self._weights[name].copy_(value)
        return self._weights
