"""The canary: compares the engine's log-probabilities of fixed sequences with the trainer's at every new version.

Three rules apply. The engine differs from the trainer by no more than its dtype explains. When the trainer's
log-probabilities change from one version to another, the engine's change too; this detects undelivered weights at the
first version. Under an adapter they change by the same: its base is the same on both sides, so this detects an adapter
of which a part or the scale is missing, although it changes too little for the first rule. Full weights change by less
in an engine of a low precision, which rounds most of an update away.
"""

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
CHANGE_NOISE: Mapping[str, float] = MappingProxyType({"float32": 2e-5, "bfloat16": 0.05})
"""Mean difference in nats between the trainer's and the engine's change under an adapter that rounding explains, by
``model.dtype``."""
CHANGE_SHARE = 0.25
"""Accepted difference as a share of the trainer's change; half of an adapter's layers are about half of its change."""


class CanaryFailed(EngineError):
    """Mismatch between the engine's and the trainer's log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryScores:
    """Log-probabilities of the canary's tokens under one policy version, [tokens]."""

    policy_version: int
    engine_logprobs: Float64Array
    trainer_logprobs: Float64Array
    """Log-probabilities of the trainer, from the manifest."""
    weights: frozenset[str]
    """SHA-256 digests of the weight files."""
    is_adapter: bool = False
    """True if the version is an adapter above the base of the version before."""

    @property
    def gap(self) -> float:
        """Largest difference over the tokens in nats; NaN if any score is NaN."""
        return float(np.abs(self.engine_logprobs - self.trainer_logprobs).max(initial=0.0))


class Canary:
    """The rules of one run, and the scores to compare the next version with."""

    def __init__(self, threshold: float, min_change: float, change_noise: float = 0.0) -> None:
        self.threshold = threshold
        self._min_change = min_change
        self._change_noise = change_noise
        self._reference: CanaryScores | None = None
        """Scores of the last version at which both the trainer's and the engine's scores changed."""

    @classmethod
    def from_config(cls, config: RunConfig) -> "Canary":
        dtype, given = config.model.dtype, config.generator.canary_threshold
        return cls(THRESHOLDS[dtype] if given is None else given, MIN_CHANGES[dtype], CHANGE_NOISE[dtype])

    def check(self, scores: CanaryScores) -> None:
        if not scores.gap <= self.threshold:
            raise CanaryFailed(
                f"policy version {scores.policy_version}: the canary's logprobs differ by {scores.gap:.3g} from the "
                f"trainer's, generator.canary_threshold is {self.threshold:g}"
            )
        before = self._reference
        if before is None or before.trainer_logprobs.shape != scores.trainer_logprobs.shape:
            self._reference = scores
            return
        by_token = scores.trainer_logprobs - before.trainer_logprobs
        engine_by_token = scores.engine_logprobs - before.engine_logprobs
        trainer_change, engine_change = float(np.abs(by_token).mean()), float(np.abs(engine_by_token).mean())
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
        missed = float(np.abs(engine_by_token - by_token).mean())
        if scores.is_adapter and missed > max(self._change_noise, CHANGE_SHARE * trainer_change):
            raise CanaryFailed(
                f"policy version {scores.policy_version}: the engine computes another adapter: from version "
                f"{before.policy_version} on, the trainer's logprobs of the canary changed by {trainer_change:.3g} on "
                f"average, and the engine's change differs from it by {missed:.3g}"
            )
        self._reference = scores
