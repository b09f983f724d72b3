"""Trainer-side log-probabilities for an old-logprob source, computed before the first update of a train step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import structlog
import torch

from rollmesh.algorithms.old_logprobs import OldLogprobs, OldLogprobSource, TrainerLogprobs, loglinear_share
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.distributed import shard, sum_over_ranks
from rollmesh.trainer.learner.forward_backward import Compute, score_batch, score_with_entropy
from rollmesh.trainer.learner.policy_model import PolicyModel, load_policy_model
from rollmesh.trainer.learner.stage_logprobs import StageRecord
from rollmesh.trainer.learner.train_batch import BoolArray, Float64Array, TrainBatch
from rollmesh.trainer.learner.weight_average import WeightAverage

PolicyFolder = Callable[[int], Path | None]
"""Function that returns the verified folder of a policy version, or None if it is not kept. Called on every rank."""


@dataclass(eq=False)
class OldLogprobScorer:
    """Runner of the forward passes that an old-logprob source requires."""

    _model: PolicyModel
    _compute: Compute
    _stage: StageRecord
    _policy_folder: PolicyFolder | None
    _average: WeightAverage
    _reference: tuple[int, PolicyModel] | None = field(default=None, init=False)

    def denominator(
        self,
        batch: TrainBatch,
        source: OldLogprobSource,
        current_version: int,
        *,
        one_minibatch: bool,
        policy: Float64Array | None = None,
    ) -> tuple[OldLogprobs, Float64Array]:
        """Compute the old log-probability of every token from ``source``.

        With one minibatch the gradient pass runs on the weights at the start of the step, so its own log-probabilities
        are used instead of a separate pass. The second result, [tokens], is 1 for these tokens, and a share for
        ``loglinear``. ``policy`` are the log-probabilities of a pass at the start of the step, if there was one.
        """
        logprobs, available, own = self._gather(batch, source.trainer_logprobs, current_version, one_minibatch, policy)
        old = source.choose(
            behavior=torch.from_numpy(batch.behavior_logprobs.astype(np.float64)),
            trainer=torch.from_numpy(logprobs),
            available=torch.from_numpy(available),
            pure=torch.from_numpy(batch.pure),
            policy=torch.from_numpy(batch.passed_mask),
        )
        if source.trainer_logprobs is TrainerLogprobs.GRADIENT_PASS:
            return old, loglinear_share(torch.from_numpy(batch.staleness)).numpy()
        return old, (own & old.from_trainer.numpy()).astype(np.float64)

    def policy(self, batch: TrainBatch) -> tuple[Float64Array, Float64Array]:
        """Score a batch under the current weights: log-probabilities and entropy, [tokens] each."""
        return score_with_entropy(self._model, self._compute, batch)

    def reference(self, batch: TrainBatch, version: int) -> Float64Array:
        """Score a batch under a pinned version, [tokens]. Raises CheckpointError if the version is not kept."""
        if self._reference is None or self._reference[0] != version:
            model = self._load(version)
            if model is None:
                raise CheckpointError(f"policy_version {version}: kl_reference_version is not kept; pin this version")
            self._reference = (version, model)
        return score_batch(self._reference[1], self._compute, batch, np.arange(batch.trajectory_count))

    def _gather(
        self,
        batch: TrainBatch,
        trainer_logprobs: TrainerLogprobs,
        current_version: int,
        one_minibatch: bool,
        policy: Float64Array | None,
    ) -> tuple[Float64Array, BoolArray, BoolArray]:
        """Return trainer-side logprobs, where they exist, and where the gradient pass gives them; [tokens] each."""
        tokens = len(batch.token_ids)
        no_token = np.zeros(tokens, np.bool_)
        zeros = np.zeros(tokens, np.float64)
        if trainer_logprobs in (TrainerLogprobs.NONE, TrainerLogprobs.GRADIENT_PASS):
            return zeros, no_token, no_token
        if trainer_logprobs is TrainerLogprobs.AVERAGE:
            if self._average.model is None:
                return zeros, no_token, no_token
            if not self._average.is_current:
                sequences = np.unique(batch.sequence_index[batch.passed_mask])
                values = score_batch(self._average.model, self._compute, batch, sequences)
                return values, batch.passed_mask, no_token
            trainer_logprobs = TrainerLogprobs.STEP_START
        now = (
            batch.passed_mask
            if trainer_logprobs is TrainerLogprobs.STEP_START
            else batch.passed_mask & (batch.versions == current_version)
        )
        if one_minibatch:
            values, own = zeros, now
        elif policy is not None:
            values, own = policy, no_token
        else:
            values = score_batch(self._model, self._compute, batch, np.unique(batch.sequence_index[now]))
            own = no_token
        available = now.copy()
        if trainer_logprobs is TrainerLogprobs.STAGE_END:
            recorded = self._stage.columns(batch)
            earlier = ~now & ~np.isnan(recorded)
            values, available = np.where(earlier, recorded, values), available | earlier
        elif trainer_logprobs is TrainerLogprobs.SNAPSHOT:
            values, available = self._snapshots(batch, current_version, values, available)
        return values, available, own

    def _snapshots(
        self, batch: TrainBatch, current_version: int, values: Float64Array, available: BoolArray
    ) -> tuple[Float64Array, BoolArray]:
        for version in np.unique(batch.versions[batch.passed_mask & batch.pure]):
            if version == current_version:
                continue
            model = self._load(int(version))
            if model is None:
                continue
            of_version = batch.passed_mask & (batch.versions == version)
            scored = score_batch(model, self._compute, batch, np.unique(batch.sequence_index[of_version]))
            values, available = np.where(of_version, scored, values), available | of_version
        return values, available

    def _load(self, version: int) -> PolicyModel | None:
        """Load a frozen, sharded model of this version. Returns None on every rank if any rank cannot load it."""
        model = self._read(version)
        found = sum_over_ranks(torch.tensor([float(model is not None)]), self._compute.world)
        if model is None or int(found) < self._compute.world.size:
            return None
        model.requires_grad_(False)
        shard(model, model.causal_lm, self._compute.world, mixed=self._compute.mixed_shards)
        return model

    def _read(self, version: int) -> PolicyModel | None:
        folder = self._policy_folder(version) if self._policy_folder is not None else None
        if folder is None:
            return None
        dtype = next(self._model.parameters()).dtype
        try:
            return load_policy_model(folder, dtype=dtype, device=self._compute.device)
        except CheckpointError as error:
            # The version was pruned between the look-up and the read. The source falls back and counts the tokens.
            log = structlog.get_logger(component="old_logprob_scores")
            log.warning("policy_not_loaded", policy_version=version, message=str(error))
            return None
