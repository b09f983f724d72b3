"""Answers of the scale bench's emulated generators, known in advance so that the consumer can check every token.

Length and tokens depend on the trajectory's id alone, so a later call on a trajectory continues the same answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field

import numpy as np

from rollmesh.recipes.countdown.tokenizer import SIGNS, VOCABULARY_SIZE, stop_token_ids
from rollmesh.types import Float32Array, Int32Array, Trajectory

_SPREAD = 0.875
"""Spread of the lengths: uniform between 0.125 and 1.875 times the mean, so that rollouts end at different times."""
_TABLE_TOKENS = 1 << 16


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers with ``mean_tokens`` tokens on average; token ids and log-probabilities are views of two tables."""

    mean_tokens: int
    _tokens: Int32Array = field(init=False, repr=False)
    _logprobs: Float32Array = field(init=False, repr=False)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(0)
        size = _TABLE_TOKENS + 2 * self.mean_tokens
        object.__setattr__(self, "_tokens", rng.integers(len(SIGNS) + 2, VOCABULARY_SIZE, size, dtype=np.int32))
        object.__setattr__(self, "_logprobs", -rng.random(size, dtype=np.float32))

    def length(self, trajectory_id: str) -> int:
        """Return the number of tokens of a trajectory's answer, with its stop token."""
        low = int((1 - _SPREAD) * self.mean_tokens)
        return low + zlib.crc32(b"length " + trajectory_id.encode()) % (2 * (self.mean_tokens - low)) + 1

    def pace(self, trajectory_id: str) -> float:
        """Return the relative speed of a trajectory's calls, 0.8 to 1.2, so that streams do not send in step."""
        return 0.8 + zlib.crc32(b"pace " + trajectory_id.encode()) % 4001 / 10_000

    def tokens(self, trajectory_id: str, first: int, count: int) -> tuple[Int32Array, Float32Array]:
        """Return ``count`` tokens of an answer from ``first``, with their log-probabilities."""
        start = zlib.crc32(trajectory_id.encode()) % _TABLE_TOKENS + first
        ids, logprobs = self._tokens[start : start + count], self._logprobs[start : start + count]
        if first + count < self.length(trajectory_id):
            return ids, logprobs
        return np.append(ids[:-1], np.int32(stop_token_ids()[0])), logprobs

    def matches(self, trajectory: Trajectory) -> bool:
        """Return True if a trajectory has exactly the tokens and log-probabilities of its answer."""
        expected = self.tokens(trajectory.trajectory_id, 0, self.length(trajectory.trajectory_id))
        found = [s.behavior_logprobs for s in trajectory.segments if s.behavior_logprobs is not None]
        logprobs = np.concatenate(found) if found else np.empty(0, np.float32)
        return np.array_equal(trajectory.response_ids, expected[0]) and np.array_equal(logprobs, expected[1])
