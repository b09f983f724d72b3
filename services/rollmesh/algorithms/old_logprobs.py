"""Sources of the denominator of the importance ratio.

sampler    the concatenated behavior_logprobs of all versions that sampled the trajectory: rollmesh's variant of
           CoPRIS, and the fallback of every other source
stage_end  the trainer's own log-probabilities, computed at the end of each stage with the weights that sampled it
           (CoPRIS as published, arXiv 2511.05589; strategy 3 of Missing Old Logits, arXiv 2605.12070); needs a barrier
recompute  one pass with the weights right before the train step: pi_prox of decoupled PPO (arXiv 2505.24298)
current    the same weights for every token, mixed caches included: pseudo on-policy (POIS of UloRL, arXiv 2507.19766)
snapshot   the stored weights of the version that sampled the token (strategy 1 of Missing Old Logits)
loglinear  between the behavior_logprobs and those of the gradient pass, without a pass of its own (AReaL)
ewma       one pass with an exponentially weighted average of the weights as proximal policy (Missing Old Logits)

A token that attended to another version's KV cache has no exact policy, and no recomputation reproduces it. The sources
that claim exactness fall back to ``sampler`` for such tokens, counted by reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor


class TrainerLogprobs(Enum):
    """Trainer-side log-probabilities that a source uses."""

    NONE = "none"
    STEP_START = "step_start"
    """Log-probabilities of one pass with the weights before the first update of the train step."""
    STAGE_END = "stage_end"
    """Log-probabilities recorded at the end of the stage that sampled the token."""
    SNAPSHOT = "snapshot"
    """Log-probabilities recomputed with the stored weights of the token's version."""
    AVERAGE = "average"
    """Log-probabilities under the average of the weights at the start of the train step."""
    GRADIENT_PASS = "gradient_pass"
    """Log-probabilities of the gradient pass, in a share that grows with the token's staleness."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobs:
    """Chosen denominator of every token."""

    values: Tensor  # float [tokens]
    from_trainer: Tensor  # bool [tokens], True where the trainer-side value was taken
    fell_back: Mapping[str, Tensor]  # bool [tokens] by reason
    """Policy tokens that fell back to ``sampler``."""

    @property
    def fallbacks(self) -> Mapping[str, int]:
        """Number of tokens that fell back, by reason; reasons without tokens are omitted."""
        counts = {reason: int(tokens.sum()) for reason, tokens in self.fell_back.items()}
        return {reason: count for reason, count in counts.items() if count}


@dataclass(frozen=True, slots=True, kw_only=True)
class OldLogprobSource:
    """One source of the denominator, with its requirements."""

    name: str
    trainer_logprobs: TrainerLogprobs
    needs_pure: bool
    """True if tokens sampled on another version's cache fall back."""
    missing_reason: str = "missing"
    """Reason counted for tokens without a trainer-side value."""

    def choose(
        self, *, behavior: Tensor, trainer: Tensor, available: Tensor, pure: Tensor, policy: Tensor
    ) -> OldLogprobs:
        """Choose ``trainer`` for the tokens that the source covers, ``behavior`` for the others.

        All [tokens]: ``behavior`` and ``trainer`` float log-probabilities, ``available`` bool where ``trainer``
        exists, ``pure`` bool where one version's weights and cache sampled the token, ``policy`` bool where a policy
        sampled it (only those are counted).
        """
        if self.trainer_logprobs in (TrainerLogprobs.NONE, TrainerLogprobs.GRADIENT_PASS):
            nowhere = torch.zeros_like(policy)
            return OldLogprobs(values=behavior, from_trainer=nowhere, fell_back={})
        mixed = policy & ~pure if self.needs_pure else torch.zeros_like(policy)
        missing = policy & ~available & ~mixed
        taken = policy & available & ~mixed
        return OldLogprobs(
            values=torch.where(taken, trainer.to(behavior.dtype), behavior),
            from_trainer=taken,
            fell_back={"mixed_cache": mixed, self.missing_reason: missing},
        )


SOURCES: Mapping[str, OldLogprobSource] = MappingProxyType(
    {
        source.name: source
        for source in (
            OldLogprobSource(name="sampler", trainer_logprobs=TrainerLogprobs.NONE, needs_pure=False),
            OldLogprobSource(name="current", trainer_logprobs=TrainerLogprobs.STEP_START, needs_pure=False),
            OldLogprobSource(name="recompute", trainer_logprobs=TrainerLogprobs.STEP_START, needs_pure=True),
            OldLogprobSource(
                name="stage_end",
                trainer_logprobs=TrainerLogprobs.STAGE_END,
                needs_pure=True,
                missing_reason="stage_not_recorded",
            ),
            OldLogprobSource(
                name="snapshot",
                trainer_logprobs=TrainerLogprobs.SNAPSHOT,
                needs_pure=True,
                missing_reason="version_not_kept",
            ),
            OldLogprobSource(
                name="ewma",
                trainer_logprobs=TrainerLogprobs.AVERAGE,
                needs_pure=False,
                missing_reason="average_not_kept",
            ),
            OldLogprobSource(name="loglinear", trainer_logprobs=TrainerLogprobs.GRADIENT_PASS, needs_pure=False),
        )
    }
)


def loglinear_share(staleness: Tensor) -> Tensor:
    """Return the share of the policy in training in ``log pi_old``, float64 [tokens].

    ``log pi_old = (1 - a) log mu + a log pi`` with ``a = d / (d + 1)`` for a token that is ``d`` train steps old: the
    way from the behavior policy to the policy after the update, up to its last step. ``staleness`` int [tokens].
    """
    return staleness / (staleness + 1.0).double()


FALLBACK_REASONS = tuple(sorted({"mixed_cache", *(source.missing_reason for source in SOURCES.values())}))
"""All reasons that may occur in ``OldLogprobs.fallbacks``."""
