"""Earlier versions of the policy, to score with: the old-logprob source ``snapshot``, and the KL reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog
import torch

from rollmesh.checkpoints.states import load_weights
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.distributed import sum_over_ranks
from rollmesh.trainer.learner.forward_backward import Compute
from rollmesh.trainer.learner.frozen_policy import AdapterOff, FrozenAdapter, FrozenModel, FrozenPolicy
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model

PolicyFolder = Callable[[int], Path | None]
"""Function that returns the verified folder of a policy version, or None if it is not kept. Called on every rank.

It raises CheckpointError if the folder cannot be read at the moment.
"""
BASE_VERSION = 0
"""Policy version that is the base of all adapters of a run."""


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
        if self._model.adapter is None:
            model = self._read_model(version)
            found = self._on_every_rank(model is not None)
            return FrozenModel(model, self._compute) if model is not None and found else None
        if version == BASE_VERSION:
            return AdapterOff(self._model)
        return self._read_adapter(version)

    def _read_model(self, version: int) -> PolicyModel | None:
        folder = self._find(version)
        if folder is None:
            return None
        dtype = next(self._model.parameters()).dtype
        try:
            return load_policy_model(folder, dtype=dtype, device=self._compute.device)
        except CheckpointError as error:
            _log_missing(version, error)
            return None

    def _read_adapter(self, version: int) -> FrozenAdapter | None:
        folder = self._find(version)
        if not self._on_every_rank(folder is not None) or folder is None:
            return None
        adapter = FrozenAdapter(self._model)
        try:
            load_weights(folder, adapter.tensors)  # fails on all ranks together
        except CheckpointError as error:
            _log_missing(version, error)
            return None
        return adapter

    def _find(self, version: int) -> Path | None:
        return None if self._folder is None else self._folder(version)

    def _on_every_rank(self, found: bool) -> bool:
        ranks = sum_over_ranks(torch.tensor([float(found)]), self._compute.world)
        return int(ranks) == self._compute.world.size


def _log_missing(version: int, error: CheckpointError) -> None:
    """Log a version that was pruned between the look-up and the read; the source falls back and counts the tokens."""
    log = structlog.get_logger(component="old_logprob_scores")
    log.warning("policy_not_loaded", policy_version=version, message=str(error))
