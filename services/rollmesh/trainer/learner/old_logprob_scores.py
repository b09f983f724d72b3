"""Trainer-side log-probabilities for an old-logprob source, gathered before the first update of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rollmesh.algorithms.old_logprobs import Evidence, OldLogprobs, OldLogprobSource
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.trainer.learner.distributed import shard, sum_over_ranks
from rollmesh.trainer.learner.forward_backward import Compute, score_batch
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model
from rollmesh.trainer.learner.stage_logprobs import StageRecord
from rollmesh.trainer.learner.train_batch import BoolArray, Float64Array, TrainBatch

PolicyFolder = Callable[[int], Path | None]
"""Verified folder of a policy version, None when it is no longer kept; asked on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """Trainer-side values where they exist."""

    logprobs: Float64Array  # [tokens]
    available: BoolArray  # [tokens]
    own: BoolArray  # [tokens], available as the detached value of the gradient pass itself: no pass of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Denominator:
    """The chosen old log-probabilities."""

    old: OldLogprobs
    own: BoolArray  # [tokens]


class OldLogprobScorer:
    """Runs the passes that an old-logprob source needs, and no more."""

    def __init__(
        self,
        model: PolicyModel,
        compute: Compute,
        stage: StageRecord,
        policy_folder: PolicyFolder | None,
    ) -> None:
        self._model = model
        self._compute = compute
        self._stage = stage
        self._policy_folder = policy_folder
        self._reference: tuple[int, PolicyModel] | None = None

    def denominator(
        self, batch: TrainBatch, source: OldLogprobSource, current_version: int, *, one_minibatch: bool
    ) -> Denominator:
        """Old log-probabilities of every token, from ``source``.

        With one minibatch the weights of the gradient pass are those the step began with, so what would be computed
        with them is not computed twice.
        """
        found = self._gather(batch, source.evidence, current_version, one_minibatch)
        old = source.choose(
            behavior=torch.from_numpy(batch.behavior_logprobs.astype(np.float64)),
            trainer=torch.from_numpy(found.logprobs),
            available=torch.from_numpy(found.available),
            pure=torch.from_numpy(batch.pure),
            policy=torch.from_numpy(batch.policy_mask),
        )
        return Denominator(old=old, own=found.own & old.from_trainer.numpy())

    def reference(self, batch: TrainBatch, version: int) -> Float64Array:
        """Log-probabilities under a pinned version, [tokens]; CheckpointError when it is not kept."""
        if self._reference is None or self._reference[0] != version:
            model = self._load(version)
            if model is None:
                raise CheckpointError(f"policy_version {version}: kl_reference_version is not kept, pin it")
            self._reference = (version, model)
        return score_batch(self._reference[1], self._compute, batch, np.arange(batch.trajectory_count))

    def _gather(self, batch: TrainBatch, evidence: Evidence, current_version: int, one_minibatch: bool) -> Gathered:
        tokens = len(batch.token_ids)
        nothing = np.zeros(tokens, np.bool_)
        zeros = np.zeros(tokens, np.float64)
        if evidence is Evidence.NONE:
            return Gathered(logprobs=zeros, available=nothing, own=nothing)
        now = (
            batch.policy_mask
            if evidence is Evidence.STEP_START
            else batch.policy_mask & (batch.versions == current_version)
        )
        if one_minibatch:
            values, own = zeros, now
        else:
            values = score_batch(self._model, self._compute, batch, np.unique(batch.sequence_index[now]))
            own = nothing
        available = now.copy()
        if evidence is Evidence.STAGE_END:
            recorded = self._stage.columns(batch)
            earlier = ~now & ~np.isnan(recorded)
            values, available = np.where(earlier, recorded, values), available | earlier
        elif evidence is Evidence.SNAPSHOT:
            values, available = self._snapshots(batch, current_version, values, available)
        return Gathered(logprobs=values, available=available, own=own)

    def _snapshots(
        self, batch: TrainBatch, current_version: int, values: Float64Array, available: BoolArray
    ) -> tuple[Float64Array, BoolArray]:
        for version in np.unique(batch.versions[batch.policy_mask & batch.pure]):
            if version == current_version:
                continue
            model = self._load(int(version))
            if model is None:
                continue
            mine = batch.versions == version
            scored = score_batch(model, self._compute, batch, np.unique(batch.sequence_index[mine]))
            values, available = np.where(mine, scored, values), available | mine
        return values, available

    def _load(self, version: int) -> PolicyModel | None:
        """A frozen, sharded model of this version; None on every rank when any rank cannot have it."""
        model = self._read(version)
        found = sum_over_ranks(torch.tensor([float(model is not None)]), self._compute.gang)
        if model is None or int(found) < self._compute.gang.world:
            return None
        model.requires_grad_(False)
        shard(model, model.causal_lm, self._compute.gang, mixed=self._compute.mixed_shards)
        return model

    def _read(self, version: int) -> PolicyModel | None:
        folder = self._policy_folder(version) if self._policy_folder is not None else None
        if folder is None:
            return None
        dtype = next(self._model.parameters()).dtype
        try:
            return load_policy_model(folder, dtype=dtype, device=self._compute.device)
        except CheckpointError as error:
            # Pruned between the look-up and the read: the source falls back and counts it.
            get_logger("evidence").warning("policy_not_loaded", policy_version=version, message=str(error))
            return None
