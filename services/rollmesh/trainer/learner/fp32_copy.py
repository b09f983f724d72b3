"""A second copy of a sharded policy in the trainer's own dtype, for scores that readers must reproduce.

FSDP2 casts the parameters to bfloat16 when it gathers them, so a model that is sharded with mixed precision cannot
compute in another dtype. The copy costs one more set of sharded weights on each rank: no gradients and no moments.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from rollmesh.trainer.learner.distributed import local_part, shard
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel


class Fp32Copy:
    """Copy of ``model`` that is refreshed on each use. Every rank must make the same calls."""

    def __init__(self, model: PolicyModel, source: ModelSource, compute: Compute) -> None:
        self._model = model
        self._source = source
        self.compute: Final = replace(compute, autocast=False, mixed_shards=False)
        """Compute settings for scoring with ``current``."""
        self._copy: PolicyModel | None = None

    @torch.no_grad()
    def current(self) -> PolicyModel:
        """Copy the current weights and return the copy. The first call loads it."""
        if self._copy is None:
            dtype = next(self._model.parameters()).dtype
            self._copy = self._source.load(dtype=dtype, device=self.compute.device)
            self._copy.requires_grad_(False)
            shard(self._copy, self._copy.causal_lm, self.compute.world, mixed=False)
        current = self._model.trained_parameters()
        for name, target in self._copy.trained_parameters().items():
            local_part(target).copy_(local_part(current[name]))
        return self._copy
