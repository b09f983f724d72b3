"""Log-probabilities that are recorded at the end of each stage, for the old-logprob source ``stage_end``."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.trainer.learner.train_batch import NO_VERSION, TrainBatch
from rollmesh.types import Float32Array, Int32Array, Trajectory

Layout = list[list[str | int]]
"""List of [trajectory id, number of recorded tokens, digest of these tokens], in order."""

_NOTHING = np.empty(0, np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Recorded:
    logprobs: Float32Array  # [recorded tokens], NaN where unknown
    digest: str
    """Digest of the tokens: an environment may restart a trajectory under the same id."""


class StageRecord:
    """Log-probabilities by trajectory, computed while the trainer had the weights that sampled each token.

    A token that is not recorded in its own stage stays unknown.
    """

    def __init__(self) -> None:
        self._recorded: dict[str, _Recorded] = {}

    def unrecorded(self, trajectory: Trajectory) -> int:
        """Return the number of response tokens after the recorded ones."""
        known = self._of(trajectory.trajectory_id, trajectory.response_ids)
        return trajectory.response_token_count - len(known)

    def append(self, trajectory: Trajectory, logprobs: Float32Array, current: int) -> None:
        """Record the new tokens at the end of a trajectory.

        ``logprobs`` [response_tokens] cover the whole response. Tokens after the recorded ones are taken if their
        version is ``current``; otherwise they become unknown.
        """
        ids = trajectory.response_ids
        known = self._of(trajectory.trajectory_id, ids)
        tail = np.where(response_versions(trajectory) == current, logprobs, np.nan)[len(known) :]
        self._recorded[trajectory.trajectory_id] = _Recorded(
            logprobs=np.concatenate([known, tail.astype(np.float32)]), digest=_digest(ids)
        )

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
        return [[i, len(recorded.logprobs), recorded.digest] for i, recorded in self._recorded.items()]

    def values(self) -> Float32Array:
        """Return all recorded log-probabilities concatenated, float32 [recorded tokens of all trajectories]."""
        return np.concatenate([_NOTHING, *(recorded.logprobs for recorded in self._recorded.values())])

    def restore(self, layout: Iterable[Sequence[str | int]], values: Float32Array) -> None:
        """Restore the records from the results of ``layout`` and ``values``."""
        self._recorded, start = {}, 0
        for trajectory_id, count, digest in layout:
            end = start + int(count)
            self._recorded[str(trajectory_id)] = _Recorded(logprobs=values[start:end].copy(), digest=str(digest))
            start = end

    def __len__(self) -> int:
        return len(self._recorded)

    def _of(self, trajectory_id: str, response_ids: Int32Array) -> Float32Array:
        recorded = self._recorded.get(trajectory_id)
        if recorded is None or recorded.digest != _digest(response_ids[: len(recorded.logprobs)]):
            return _NOTHING
        return recorded.logprobs


def _digest(token_ids: Int32Array) -> str:
    return hashlib.blake2b(token_ids.astype("<i4").tobytes(), digest_size=16).hexdigest()


def current_version(train_step_of_version: Mapping[int, int], trained_step: int) -> int:
    """Return the newest version with the weights after ``trained_step`` batches; NO_VERSION if there is none."""
    return max((v for v, step in train_step_of_version.items() if step == trained_step), default=NO_VERSION)


def response_versions(trajectory: Trajectory) -> Int32Array:
    """Return the version of every response token, NO_VERSION where no policy wrote, [response_tokens]."""
    versions = [
        np.full(len(s), NO_VERSION if s.behavior_logprobs is None else s.policy_version, np.int32)
        for s in trajectory.segments
    ]
    return np.concatenate(versions) if versions else np.empty(0, np.int32)
