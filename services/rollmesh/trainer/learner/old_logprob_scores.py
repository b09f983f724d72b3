"""Trainer-side log-probabilities for an old-logprob source, computed before the first update of a train step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.algorithms.old_logprobs import OldLogprobs, OldLogprobSource, TrainerLogprobs, loglinear_share
from rollmesh.trainer.learner.forward_backward import Compute, score_batch, score_with_entropy
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.policy_versions import PolicyVersions
from rollmesh.trainer.learner.stage_logprobs import StageRecord
from rollmesh.trainer.learner.train_batch import BoolArray, Float64Array, TrainBatch
from rollmesh.trainer.learner.weight_average import WeightAverage


@dataclass(eq=False)
class OldLogprobScorer:
    """Runner of the forward passes that an old-logprob source requires."""

    _model: PolicyModel
    _compute: Compute
    _stage: StageRecord
    _versions: PolicyVersions
    _average: WeightAverage

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
        with self._versions.reference(version).scoring() as model:
            return score_batch(model, self._compute, batch, np.arange(batch.trajectory_count))

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
            average = self._average.policy
            if average is None:
                return zeros, no_token, no_token
            if not self._average.is_current:
                sequences = np.unique(batch.sequence_index[batch.passed_mask])
                with average.scoring() as model:
                    values = score_batch(model, self._compute, batch, sequences)
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
            snapshot = self._versions.load(int(version))
            if snapshot is None:
                continue
            of_version = batch.passed_mask & (batch.versions == version)
            with snapshot.scoring() as model:
                scored = score_batch(model, self._compute, batch, np.unique(batch.sequence_index[of_version]))
            values, available = np.where(of_version, scored, values), available | of_version
        return values, available
