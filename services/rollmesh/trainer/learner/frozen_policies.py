"""Other weights than the current ones, to score with: an earlier version, an average, a copy in float32."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import structlog
import torch
from torch import Tensor

from rollmesh.checkpoints.states import load_weights
from rollmesh.config.old_logprob_methods import EwmaOptions
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.distributed import local_part, shard, sum_over_ranks
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.policy_model import ModelSource, PolicyModel, load_policy_model

PolicyFolder = Callable[[int], Path | None]
"""Function that returns the verified folder of a policy version, or None if it is not kept. Called on every rank.

It raises CheckpointError if the folder cannot be read at the moment.
"""
BASE_VERSION = 0
"""Policy version that is the base of all adapters of a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenPolicy:
    """Weights of a policy that is not in training."""

    tensors: Mapping[str, Tensor]
    """Live (possibly sharded) tensors, with the names of ``PolicyModel.trained_parameters``."""
    scoring: Callable[[], AbstractContextManager[PolicyModel]]
    """Yields a model with these weights, for passes without a gradient within the block."""


def frozen_model(model: PolicyModel, compute: Compute) -> FrozenPolicy:
    """Freeze and shard a second model, whose full weights are the policy."""
    model.requires_grad_(False)
    shard(model, model.causal_lm, compute.world, mixed=compute.mixed_shards)
    tensors = {name: p.detach() for name, p in model.trained_parameters().items()}
    return FrozenPolicy(tensors=tensors, scoring=lambda: nullcontext(model))


def frozen_adapter(model: PolicyModel) -> FrozenPolicy:
    """Return values of an adapter, 0 until they are filled, which ``model`` takes within ``scoring``."""
    values = {name: torch.zeros_like(p) for name, p in model.trained_parameters().items()}

    @contextmanager
    def scoring() -> Iterator[PolicyModel]:
        live = {name: local_part(p.detach()) for name, p in model.trained_parameters().items()}
        current = {name: value.clone() for name, value in live.items()}
        try:
            for name, value in values.items():
                live[name].copy_(local_part(value))
            yield model
        finally:
            for name, value in current.items():
                live[name].copy_(value)

    return FrozenPolicy(tensors=values, scoring=scoring)


@dataclass(eq=False)
class PolicyVersions:
    """Published versions of the policy in training."""

    _model: PolicyModel
    _compute: Compute
    _folder: PolicyFolder | None
    _reference: tuple[int, FrozenPolicy] | None = field(default=None, init=False)

    def reference(self, version: int) -> FrozenPolicy:
        """Return a pinned version and keep it in memory. Raises CheckpointError if the version is not kept."""
        if self._reference is None or self._reference[0] != version:
            found = self.load(version)
            if found is None:
                raise CheckpointError(f"policy_version {version}: kl_reference_version is not kept; pin this version")
            self._reference = (version, found)
        return self._reference[1]

    def load(self, version: int) -> FrozenPolicy | None:
        """Load a version: a second model, or the values of its adapter. None on every rank if any cannot load it."""
        if self._model.adapter is not None and version == BASE_VERSION:
            return FrozenPolicy(tensors={}, scoring=self._model.base_only)
        folder = None if self._folder is None else self._folder(version)
        try:
            if self._model.adapter is None:
                return self._read_model(folder)
            if not self._on_every_rank(folder is not None) or folder is None:
                return None
            adapter = frozen_adapter(self._model)
            load_weights(folder, adapter.tensors)  # fails on all ranks together
            return adapter
        except CheckpointError as error:
            # Pruned between the look-up and the read: the source falls back and counts the tokens.
            log = structlog.get_logger(component="old_logprob_scores")
            log.warning("policy_not_loaded", policy_version=version, message=str(error))
            return None

    def _read_model(self, folder: Path | None) -> FrozenPolicy | None:
        """Read full weights; the ranks agree before the error of one is raised."""
        model, failed = None, None
        try:
            if folder is not None:
                dtype = next(self._model.parameters()).dtype
                model = load_policy_model(folder, dtype=dtype, device=self._compute.device)
        except CheckpointError as error:
            failed = error
        found = self._on_every_rank(model is not None)
        if failed is not None:
            raise failed
        return frozen_model(model, self._compute) if model is not None and found else None

    def _on_every_rank(self, found: bool) -> bool:
        ranks = sum_over_ranks(torch.tensor([float(found)]), self._compute.world)
        return int(ranks) == self._compute.world.size


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
        if self._average is None and self._model.adapter is not None:
            self._average = frozen_adapter(self._model)
        elif self._average is None:
            dtype = next(self._model.parameters()).dtype
            model = self._source.load(dtype=dtype, device=self._compute.device)
            self._average = frozen_model(model, self._compute)
        return self._average


@dataclass(eq=False)
class Fp32Copy:
    """Copy of ``_model`` that is refreshed on each use. Every rank must make the same calls."""

    _model: PolicyModel
    _source: ModelSource
    compute: Final[Compute]
    """Compute settings for scoring with ``current``."""
    _copy: PolicyModel | None = field(default=None, init=False)

    @torch.no_grad()
    def current(self) -> PolicyModel:
        """Copy the current weights and return the copy. The first call loads it."""
        if self._copy is None:
            dtype = next(self._model.parameters()).dtype
            self._copy = self._source.load(dtype=dtype, device=self.compute.device)
            frozen_model(self._copy, self.compute)
        current = self._model.trained_parameters()
        for name, target in self._copy.trained_parameters().items():
            local_part(target).copy_(local_part(current[name]))
        return self._copy
