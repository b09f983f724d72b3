"""The canary: an engine's log-probabilities of fixed sequences beside the trainer's, at every new version.

Two rules. The engine is as near to the trainer as its dtype allows. Where the trainer's log-probabilities moved from
one version to another, the engine's moved too: this finds weights that were never delivered at the first version.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.errors import EngineError
from rollmesh.types import Float64Array

THRESHOLDS: Mapping[str, float] = MappingProxyType({"float32": 5e-3, "bfloat16": 0.5})
"""Nats, by ``model.dtype``. The trainer's values are of its own float32 weights: rounded to bfloat16 and served in it,
the countdown model differs by up to 0.26 on the canary's least likely tokens, and by 2e-5 in float32."""
LEAST_MOVES: Mapping[str, float] = MappingProxyType({"float32": 1e-6, "bfloat16": 0.02})
"""Nats in the mean over the canary, by ``model.dtype``: below, the trainer's move is lost in the engine's rounding."""
UNMOVED_SHARE = 0.1
"""An engine that moved by less than this share of the trainer's move holds the weights that it had before."""


class CanaryFailed(EngineError):
    """The engine does not reproduce the trainer's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Log-probabilities of the canary's tokens under one policy version, [tokens]."""

    policy_version: int
    own: Float64Array
    """The engine's."""
    theirs: Float64Array
    """The trainer's, from the manifest."""
    weights: frozenset[str]
    """SHA-256 digests of the weight files."""

    @property
    def gap(self) -> float:
        """Largest difference of a token, in nats; NaN where a score is no number."""
        return float(np.abs(self.own - self.theirs).max(initial=0.0))


class Canary:
    """The rules of one run, and the scores that the next version is compared with."""

    def __init__(self, threshold: float, least_move: float) -> None:
        self._threshold = threshold
        self._least_move = least_move
        self._moved_last: CanaryScores | None = None
        """Those of the last version at which the trainer's scores moved, and the engine's with them."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Canary:
        """The rules of a run file."""
        return cls(canary_threshold(config), LEAST_MOVES[config.model.dtype])

    def check(self, scores: CanaryScores) -> None:
        """Accept a version, or raise CanaryFailed with the reason."""
        if not scores.gap <= self._threshold:
            raise CanaryFailed(
                f"policy version {scores.policy_version}: the canary's logprobs differ by {scores.gap:.3g} from the "
                f"trainer's, generator.canary_threshold is {self._threshold:g}"
            )
        before = self._moved_last
        if before is None or before.theirs.shape != scores.theirs.shape:
            self._moved_last = scores
            return
        theirs = float(np.abs(scores.theirs - before.theirs).mean())
        own = float(np.abs(scores.own - before.own).mean())
        if theirs < self._least_move or scores.weights == before.weights:
            # The moves of further versions are added to this one. A trainer that publishes the same weights again may
            # score them on other hardware, which rounds otherwise.
            return
        if own < UNMOVED_SHARE * theirs:
            raise CanaryFailed(
                f"policy version {scores.policy_version}: its weights were not delivered to the engine: from version "
                f"{before.policy_version} on, the trainer's logprobs of the canary moved by {theirs:.3g} in the mean "
                f"and the engine's by {own:.3g}"
            )
        self._moved_last = scores


def canary_threshold(config: RunConfig) -> float:
    """The run's ``generator.canary_threshold``, or what fits its dtype."""
    given = config.generator.canary_threshold
    return THRESHOLDS[config.model.dtype] if given is None else given
