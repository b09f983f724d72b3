"""A second copy of a sharded policy, in the trainer's own dtype: for scores that a reader must find again.

FSDP2 casts the parameters to bfloat16 while it gathers them, so a model that is sharded with mixed precision has no
other way to compute. The copy costs one more set of sharded weights on each rank, no gradients and no moments.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rollmesh.trainer.learner.distributed import shard
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model


class Fp32Copy:
    """Follows the weights of ``model``; every rank makes the same calls."""

    def __init__(self, model: PolicyModel, source: Path, compute: Compute) -> None:
        self._model = model
        self._source = source
        self._compute = replace(compute, autocast=False, mixed_shards=False)
        self._twin: PolicyModel | None = None

    @property
    def compute(self) -> Compute:
        """How to score with ``current``."""
        return self._compute

    @torch.no_grad()
    def current(self) -> PolicyModel:
        """The twin with the present weights, made when it is first asked for."""
        if self._twin is None:
            dtype = next(self._model.parameters()).dtype
            self._twin = load_policy_model(self._source, dtype=dtype, device=self._compute.device)
            self._twin.requires_grad_(False)
            shard(self._twin, self._twin.causal_lm, self._compute.gang, mixed=False)
        for mine, theirs in zip(self._twin.parameters(), self._model.parameters(), strict=True):
            _local(mine).copy_(_local(theirs))
        return self._twin


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
