"""Log-probabilities recorded at the end of each stage, for the old-logprob source ``stage_end``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from rollmesh.trainer.batch import NO_VERSION, TrainBatch
from rollmesh.types import Float32Array, Int32Array, Trajectory


class StageRecord:
    """Per trajectory, what the trainer computed while the weights that sampled each token were still its own.

    Tokens that were not recorded in their own stage can never be: they stay unknown.
    """

    def __init__(self) -> None:
        self._logprobs: dict[str, Float32Array] = {}

    def unrecorded(self, trajectory: Trajectory) -> int:
        """Response tokens beyond those already looked at."""
        return trajectory.response_token_count - len(self._logprobs.get(trajectory.trajectory_id, ()))

    def append(self, trajectory_id: str, logprobs: Float32Array, versions: Int32Array, current: int) -> None:
        """Record the new tail of a trajectory.

        ``logprobs`` and ``versions`` [response_tokens] cover the whole response; only tokens beyond the recorded ones
        are taken, and of these only those of version ``current`` (the others become unknown).
        """
        known = self._logprobs.get(trajectory_id, np.empty(0, np.float32))
        tail = np.where(versions == current, logprobs, np.nan)[len(known) :]
        self._logprobs[trajectory_id] = np.concatenate([known, tail.astype(np.float32)])

    def columns(self, batch: TrainBatch) -> Float32Array:
        """Recorded values for the tokens of a batch, NaN where unknown, [tokens]."""
        values = np.full(len(batch.token_ids), np.nan, np.float32)
        for i, trajectory_id in enumerate(batch.trajectory_ids):
            known = self._logprobs.get(trajectory_id)
            if known is not None:
                start = int(batch.starts[i] + batch.prompt_lengths[i])
                stop = min(start + len(known), int(batch.starts[i + 1]))
                values[start:stop] = known[: stop - start]
        return values

    def forget(self, trajectory_ids: Iterable[str]) -> None:
        """Drop trajectories that were trained on or evicted."""
        for trajectory_id in trajectory_ids:
            self._logprobs.pop(trajectory_id, None)

    def __len__(self) -> int:
        return len(self._logprobs)


def current_version(train_step_of_version: Mapping[int, int], trained_step: int) -> int:
    """Version whose weights are those after ``trained_step`` batches: after a roll-back the newest; else NO_VERSION."""
    return max((v for v, step in train_step_of_version.items() if step == trained_step), default=NO_VERSION)


def response_versions(trajectory: Trajectory) -> Int32Array:
    """Version of every response token, NO_VERSION where no policy wrote, [response_tokens]."""
    parts = [
        np.full(len(s), NO_VERSION if s.behavior_logprobs is None else s.policy_version, np.int32)
        for s in trajectory.segments
    ]
    return np.concatenate(parts) if parts else np.empty(0, np.int32)
