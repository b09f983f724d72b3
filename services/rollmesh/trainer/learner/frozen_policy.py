"""Other weights than the current ones, to score with: an earlier version, an average.

With full weights they are a second model. With an adapter they are the values of the adapter only, which take the place
of the current ones in the policy model for one block, so no second base is in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import Tensor

from rollmesh.trainer.learner.distributed import local_part, shard
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel


class FrozenPolicy(Protocol):
    """Weights of a policy that is not in training."""

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """Live (possibly sharded) tensors, with the names of ``PolicyModel.trained_parameters``."""

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        """Yield a model with these weights, for passes without a gradient within the block."""


class FrozenModel:
    """Full weights: a second model."""

    def __init__(self, model: PolicyModel, compute: Compute) -> None:
        """Freeze and shard the model."""
        model.requires_grad_(False)
        shard(model, model.causal_lm, compute.world, mixed=compute.mixed_shards)
        self._model = model

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {name: p.detach() for name, p in self._model.trained_parameters().items()}

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        yield self._model


class FrozenAdapter:
    """Values of an adapter, for the policy model that has the base."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model
        self._values = {name: torch.zeros_like(p) for name, p in model.trained_parameters().items()}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return self._values

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        live = {name: local_part(p.detach()) for name, p in self._model.trained_parameters().items()}
        current = {name: value.clone() for name, value in live.items()}
        try:
            for name, value in self._values.items():
                live[name].copy_(local_part(value))
            yield self._model
        finally:
            for name, value in current.items():
                live[name].copy_(value)


class AdapterOff:
    """The base: the policy model with its adapter switched off."""

    def __init__(self, model: PolicyModel) -> None:
        self._model = model

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        return {}

    @contextmanager
    def scoring(self) -> Iterator[PolicyModel]:
        with self._model.base_only() as model:
            yield model


def frozen_like(model: PolicyModel, source: ModelSource, compute: Compute) -> FrozenPolicy:
    """Return frozen weights of the same layout as ``model``; the caller fills ``tensors``."""
    if model.adapter is not None:
        return FrozenAdapter(model)
    dtype = next(model.parameters()).dtype
    return FrozenModel(source.load(dtype=dtype, device=compute.device), compute)
