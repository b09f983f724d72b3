"""The canary: compares the engine's log-probabilities of fixed sequences with the trainer's at every new version.

Two rules apply. The engine differs from the trainer by no more than its dtype explains. When the trainer's
log-probabilities change from one version to another, the engine's change too; this detects undelivered weights at the
first version.
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
"""Largest accepted difference in nats, by ``model.dtype``. The trainer scores with its float32 weights. Served in
bfloat16, the countdown model differs by up to 0.26 on the canary's least likely tokens; in float32, by 2e-5."""
MIN_CHANGES: Mapping[str, float] = MappingProxyType({"float32": 1e-6, "bfloat16": 0.02})
"""Mean change in nats over the canary, by ``model.dtype``; the engine's rounding hides a smaller change."""
UNCHANGED_SHARE = 0.1
"""Share of the trainer's change; an engine that changed by less still holds its previous weights."""


class CanaryFailed(EngineError):
    """Mismatch between the engine's and the trainer's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Log-probabilities of the canary's tokens under one policy version, [tokens]."""

    policy_version: int
    engine_logprobs: Float64Array
    """Log-probabilities of the engine."""
    trainer_logprobs: Float64Array
    """Log-probabilities of the trainer, from the manifest."""
    weights: frozenset[str]
    """SHA-256 digests of the weight files."""

    @property
    def gap(self) -> float:
        """Largest difference over the tokens in nats; NaN if any score is NaN."""
        return float(np.abs(self.engine_logprobs - self.trainer_logprobs).max(initial=0.0))


class Canary:
    """The rules of one run, and the scores to compare the next version with."""

    def __init__(self, threshold: float, min_change: float) -> None:
        self._threshold = threshold
        self._min_change = min_change
        self._reference: CanaryScores | None = None
        """Scores of the last version at which both the trainer's and the engine's scores changed."""

    @classmethod
    def from_config(cls, config: RunConfig) -> Canary:
        """Build the rules of a run file."""
        return cls(canary_threshold(config), MIN_CHANGES[config.model.dtype])

    def check(self, scores: CanaryScores) -> None:
        """Accept a version, or raise CanaryFailed with the reason."""
        if not scores.gap <= self._threshold:
            raise CanaryFailed(
                f"policy version {scores.policy_version}: the canary's logprobs differ by {scores.gap:.3g} from the "
                f"trainer's, generator.canary_threshold is {self._threshold:g}"
            )
        before = self._reference
        if before is None or before.trainer_logprobs.shape != scores.trainer_logprobs.shape:
            self._reference = scores
            return
        trainer_change = float(np.abs(scores.trainer_logprobs - before.trainer_logprobs).mean())
        engine_change = float(np.abs(scores.engine_logprobs - before.engine_logprobs).mean())
        if trainer_change < self._min_change or scores.weights == before.weights:
            # The next version is compared with the same scores, so small changes add up. A trainer that publishes the
            # same weights again may score them on other hardware, which rounds differently.
            return
        if engine_change < UNCHANGED_SHARE * trainer_change:
            raise CanaryFailed(
                f"policy version {scores.policy_version}: its weights were not delivered to the engine: from version "
                f"{before.policy_version} on, the trainer's logprobs of the canary changed by {trainer_change:.3g} "
                f"on average and the engine's by {engine_change:.3g}"
            )
        self._reference = scores


def canary_threshold(config: RunConfig) -> float:
    """Return the run's ``generator.canary_threshold``, or the default of its dtype."""
    given = config.generator.canary_threshold
    return THRESHOLDS[config.model.dtype] if given is None else given
