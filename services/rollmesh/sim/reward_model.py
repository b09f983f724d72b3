"""Rewards of a simulated mesh: seconds on a bounded number of workers, and which answers are correct.

Both are forced by name: an answer gets the same seconds and the same reward under every schedule.
"""

import heapq
import math
from dataclasses import dataclass, field
from hashlib import blake2b
from statistics import NormalDist

import numpy as np

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModel:
    """Lognormal scoring times on ``worker_count`` workers."""

    median_seconds: float
    """Median time of one answer; 0: a reward is known at once."""
    sigma: float = 0.0
    """Standard deviation of ln(seconds)."""
    worker_count: int = 1
    seed: int = 0

    def seconds(self, answer_id: str, incarnation: int) -> float:
        """Return the scoring time of one answer."""
        if not self.median_seconds:
            return 0.0
        digest = blake2b(f"{self.seed}/{answer_id}/{incarnation}".encode(), digest_size=6).digest()
        normal = _NORMAL.inv_cdf((int.from_bytes(digest) + 0.5) / 2**48)
        return self.median_seconds * math.exp(self.sigma * normal)


class RewardWorkers:
    """Idle workers that score answers in the order of their arrival, each one at a time."""

    def __init__(self, model: RewardModel) -> None:
        self._model = model
        self._free_at = [0.0] * model.worker_count
        """Heap of the times at which the workers become free."""

    def known_at(self, now: float, answer_id: str, incarnation: int) -> float:
        """Return the time at which the reward of an answer that arrives now is known; times must not decrease."""
        begins = max(now, self._free_at[0])
        ends = begins + self._model.seconds(answer_id, incarnation)
        heapq.heapreplace(self._free_at, ends)
        return ends


@dataclass(frozen=True, slots=True, kw_only=True)
class SolveModel:
    """Rewards of 1 or 0; each prompt has its probability of 1, uniform in 0 to 1."""

    seed: int = 0
    _probabilities: dict[int, float] = field(default_factory=dict, init=False, repr=False, compare=False)
    """Probability of each prompt drawn so far."""

    def probability(self, prompt: int) -> float:
        """Return the probability that an answer to a prompt is correct."""
        if (known := self._probabilities.get(prompt)) is None:
            known = float(np.random.default_rng((self.seed, 0, prompt)).beta(1.0, 1.0))
            self._probabilities[prompt] = known
        return known

    def rewards(self, position: int, prompt: int, members: int) -> tuple[float, ...]:
        """Return the rewards of the first members of the group at a position; more members change no earlier one."""
        draws = np.random.default_rng((self.seed, 1, position)).random(members)
        return tuple((draws < self.probability(prompt)).astype(float).tolist())
