"""Exponentially weighted average of the weights, the proximal policy of the old-logprob source ``ewma``.

    theta_prox(t) = sum_k beta^(t-k) theta(k) / sum_k beta^(t-k)         k = 0 .. t since the last reset
    Z <- beta Z + 1,   theta_prox <- theta_prox + (theta - theta_prox) / Z

Source: the revised PPO-EWMA of Missing Old Logits (arXiv 2605.12070), after batch-size invariance (arXiv 2110.00641).
The average costs one more set of the trained (sharded) weights, in memory and in every trainer state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rollmesh.config.old_logprob_methods import EwmaOptions
from rollmesh.trainer.learner.distributed import local_part
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.frozen_policy import FrozenPolicy, frozen_like
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel

_PREFIX, _WEIGHT = "ewma.", "ewma_weight"


@dataclass(eq=False)
class WeightAverage:
    """Average of the weights of ``_model``; every rank must make the same calls."""

    _model: PolicyModel
    _source: ModelSource
    _compute: Compute
    _average: FrozenPolicy | None = field(default=None, init=False)
    _weight: float = field(default=0.0, init=False)
    """Z, the sum of the powers of beta; 0 without an average."""

    @property
    def policy(self) -> FrozenPolicy | None:
        """The averaged weights; None until ``start``, and after ``drop``."""
        return self._average if self._weight else None

    @property
    def is_current(self) -> bool:
        """True if the average has the weights of the policy: after a start and after a reset."""
        return self._weight == 1.0

    def start(self) -> None:
        """Begin with the current weights, unless there is an average."""
        if not self._weight:
            self._reset()

    def drop(self) -> None:
        """Free the average: the next ``start`` begins with the weights of that moment."""
        self._average, self._weight = None, 0.0

    @torch.no_grad()
    def update(self, options: EwmaOptions, active_share: float) -> bool:
        """Add the weights after a train step; return True if the average was reset to them.

        ``active_share`` is the share of the step's tokens whose gradient no mask and no clip has removed. A reset
        follows when it is below ``reset_below``, as the policy has then left the region around the average.
        """
        if not active_share >= options.reset_below:
            self._reset()
            return True
        self._weight = options.beta * self._weight + 1
        for mean, current in self._pairs():
            mean.add_((current - mean) / self._weight)
        return False

    def tensors(self) -> dict[str, Tensor]:
        """Return the live (possibly sharded) average by name; empty without one."""
        if self.policy is None:
            return {}
        return {f"{_PREFIX}{name}": tensor for name, tensor in self.policy.tensors.items()}

    def tensors_to_fill(self, extra: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the tensors to load the average of a state with this ``extra`` into; empty if it has none."""
        if _WEIGHT not in extra:
            return {}
        return {f"{_PREFIX}{name}": tensor for name, tensor in self._copy().tensors.items()}

    def extra(self) -> dict[str, Any]:
        """Return the rest of the average, as JSON values."""
        return {_WEIGHT: self._weight} if self._weight else {}

    def restore(self, extra: Mapping[str, Any]) -> None:
        """Restore ``extra`` after its ``tensors_to_fill`` are filled."""
        self._weight = float(extra.get(_WEIGHT, 0.0))

    @torch.no_grad()
    def _reset(self) -> None:
        for mean, current in self._pairs():
            mean.copy_(current)
        self._weight = 1.0

    def _pairs(self) -> list[tuple[Tensor, Tensor]]:
        current = self._model.trained_parameters()
        return [(local_part(mean), local_part(current[name])) for name, mean in self._copy().tensors.items()]

    def _copy(self) -> FrozenPolicy:
        if self._average is None:
            self._average = frozen_like(self._model, self._source, self._compute)
        return self._average
