"""Trainer-side log-probabilities for an old-logprob source, computed before the first update of a train step."""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rollmesh.algorithms.ratios import OldLogprobs, choose_old_logprobs, loglinear_share
from rollmesh.config.old_logprob_methods import OldLogprobMethod, TrainerLogprobs
from rollmesh.kept_sets import trajectory_sets
from rollmesh.trainer.learner.forward_backward import Compute, score_batch, score_sequences
from rollmesh.trainer.learner.frozen_policies import PolicyVersions, WeightAverage
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.train_batch import NO_VERSION, TrainBatch
from rollmesh.types import BoolArray, Float32Array, Float64Array, Int32Array, Trajectory


@dataclass(eq=False)
class OldLogprobScorer:
    """Runner of the forward passes that an old-logprob source requires."""

    _model: PolicyModel
    _compute: Compute
    _stage: "StageRecord"
    _versions: PolicyVersions
    _average: WeightAverage

    def denominator(
        self,
        batch: TrainBatch,
        source: OldLogprobMethod,
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
        old = choose_old_logprobs(
            source,
            behavior=torch.from_numpy(batch.behavior_logprobs.astype(np.float64)),
            trainer=torch.from_numpy(logprobs),
            available=torch.from_numpy(available),
            pure=torch.from_numpy(batch.pure),
            policy=torch.from_numpy(batch.passed_mask),
        )
        if source.trainer_logprobs is TrainerLogprobs.GRADIENT_PASS:
            return old, loglinear_share(torch.from_numpy(batch.staleness)).numpy()
        return old, (own & old.from_trainer.numpy()).astype(np.float64)

    def reference(self, batch: TrainBatch, version: int) -> Float64Array:
        """Score a batch under a pinned version, [tokens]. Raises CheckpointError if the version is not kept."""
        with self._versions.reference(version).scoring() as model:
            return score_batch(model, self._compute, batch, np.arange(batch.trajectory_count))

    def record_stage(self, trajectories: Sequence[Trajectory], current_version: int) -> int:
        """Record log-probabilities of trajectories with new tokens under the current weights; return their number."""
        fresh = [t for t in trajectories if self._stage.unrecorded(t) > 0]
        for temperature in dict.fromkeys(t.segments[-1].temperature for t in fresh):
            members = [t for t in fresh if t.segments[-1].temperature == temperature]
            ids = [np.concatenate([t.prompt.token_ids, t.response_ids]).astype(np.int32) for t in members]
            # Same precision as the gradient pass, so that on-policy ratios are 1.
            sets = [trajectory_sets(t) for t in members]
            scored = score_sequences(self._model, self._compute, ids, temperature, sets)
            for trajectory, values in zip(members, scored, strict=True):
                self._stage.append(trajectory, values[len(trajectory.prompt.token_ids) - 1 :], current_version)
        return len(fresh)

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
        now = batch.passed_mask
        if trainer_logprobs is not TrainerLogprobs.STEP_START:
            now = now & (batch.versions == current_version)
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
            if version == current_version or (snapshot := self._versions.load(int(version))) is None:
                continue
            of_version = batch.passed_mask & (batch.versions == version)
            with snapshot.scoring() as model:
                scored = score_batch(model, self._compute, batch, np.unique(batch.sequence_index[of_version]))
            values, available = np.where(of_version, scored, values), available | of_version
        return values, available


Layout = list[list[str | int]]
"""List of [trajectory id, number of recorded tokens, digest of these tokens], in order."""

_NOTHING = np.empty(0, np.float32)


class StageRecord:
    """Log-probabilities by trajectory, each computed in the stage that sampled the token, or unknown for good."""

    def __init__(self) -> None:
        self._recorded: dict[str, tuple[Float32Array, str]] = {}
        """By trajectory: log-probabilities [recorded tokens], NaN where unknown, and the digest of these tokens: an
        environment may restart a trajectory under the same id."""

    def unrecorded(self, trajectory: Trajectory) -> int:
        """Return the number of response tokens after the recorded ones."""
        return trajectory.response_token_count - len(self._of(trajectory.trajectory_id, trajectory.response_ids))

    def append(self, trajectory: Trajectory, logprobs: Float32Array, current: int) -> None:
        """Record the new tokens at the end of a trajectory.

        ``logprobs`` [response_tokens] cover the whole response. Tokens after the recorded ones are taken if their
        version is ``current``; otherwise they become unknown.
        """
        ids = trajectory.response_ids
        known = self._of(trajectory.trajectory_id, ids)
        versions = [
            np.full(len(s), NO_VERSION if s.behavior_logprobs is None else s.policy_version)
            for s in trajectory.segments
        ]
        sampled_now = np.concatenate([*versions, np.empty(0, np.int64)]) == current
        tail = np.where(sampled_now, logprobs, np.nan)[len(known) :].astype(np.float32)
        self._recorded[trajectory.trajectory_id] = np.concatenate([known, tail]), _digest(ids)

    def columns(self, batch: TrainBatch) -> Float32Array:
        """Return the recorded values of the tokens of a batch, NaN where unknown, [tokens]."""
        values = np.full(len(batch.token_ids), np.nan, np.float32)
        for i, trajectory_id in enumerate(batch.trajectory_ids):
            start = int(batch.starts[i] + batch.prompt_lengths[i])
            known = self._of(trajectory_id, batch.token_ids[start : int(batch.starts[i + 1])])
            values[start : start + len(known)] = known
        return values

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Drop trajectories that were trained on."""
        for trajectory_id in trajectory_ids:
            self._recorded.pop(trajectory_id, None)

    def keep(self, trajectory_ids: Iterable[str]) -> None:
        """Drop all trajectories but these: the others were evicted, rolled back or lost."""
        kept = set(trajectory_ids)
        self._recorded = {i: recorded for i, recorded in self._recorded.items() if i in kept}

    def layout(self) -> Layout:
        """Return the layout of ``values``, as JSON values."""
        return [[i, len(logprobs), digest] for i, (logprobs, digest) in self._recorded.items()]

    def values(self) -> Float32Array:
        """Return all recorded log-probabilities concatenated, float32 [recorded tokens of all trajectories]."""
        return np.concatenate([_NOTHING, *(logprobs for logprobs, _ in self._recorded.values())])

    def restore(self, layout: Iterable[Sequence[str | int]], values: Float32Array) -> None:
        """Restore the records from the results of ``layout`` and ``values``."""
        self._recorded, start = {}, 0
        for trajectory_id, count, digest in layout:
            end = start + int(count)
            self._recorded[str(trajectory_id)] = values[start:end].copy(), str(digest)
            start = end

    def __len__(self) -> int:
        return len(self._recorded)

    def _of(self, trajectory_id: str, response_ids: Int32Array) -> Float32Array:
        logprobs, digest = self._recorded.get(trajectory_id, (_NOTHING, ""))
        return logprobs if digest == _digest(response_ids[: len(logprobs)]) else _NOTHING


def _digest(token_ids: Int32Array) -> str:
    return hashlib.blake2b(token_ids.astype("<i4").tobytes(), digest_size=16).hexdigest()


def current_version(train_step_of_version: Mapping[int, int], trained_step: int) -> int:
    """Return the newest version with the weights after ``trained_step`` batches; NO_VERSION if there is none."""
    return max((v for v, step in train_step_of_version.items() if step == trained_step), default=NO_VERSION)
