"""Denominator of the importance ratio, by the old-logprob source of a run (``config/old_logprob_methods.py``).

``sampler`` is the fallback of every other source: a token that attended to another version's KV cache has no exact
policy, and no recomputation reproduces it. Sources that claim exactness fall back for such tokens, counted by reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rollmesh.config.old_logprob_methods import OLD_LOGPROBS, OldLogprobMethod


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


def choose_old_logprobs(
    source: OldLogprobMethod, *, behavior: Tensor, trainer: Tensor, available: Tensor, pure: Tensor, policy: Tensor
) -> OldLogprobs:
    """Choose ``trainer`` for the tokens that the source covers, ``behavior`` for the others.

    All [tokens]: ``behavior`` and ``trainer`` float log-probabilities, ``available`` bool where ``trainer`` exists,
    ``pure`` bool where one version's weights and cache sampled the token, ``policy`` bool where a policy sampled it
    (only those are counted).
    """
    if not source.is_known_early:
        return OldLogprobs(values=behavior, from_trainer=torch.zeros_like(policy), fell_back={})
    mixed = policy & ~pure if source.needs_pure else torch.zeros_like(policy)
    taken = policy & available & ~mixed
    return OldLogprobs(
        values=torch.where(taken, trainer.to(behavior.dtype), behavior),
        from_trainer=taken,
        fell_back={"mixed_cache": mixed, source.missing_reason: policy & ~available & ~mixed},
    )


def loglinear_share(staleness: Tensor) -> Tensor:
    """Return the share of the policy in training in ``log pi_old``, float64 [tokens].

    ``log pi_old = (1 - a) log mu + a log pi`` with ``a = d / (d + 1)`` for a token that is ``d`` train steps old: the
    way from the behavior policy to the policy after the update, up to its last step. ``staleness`` int [tokens].
    """
    return staleness / (staleness + 1.0).double()


FALLBACK_REASONS = tuple(sorted({"mixed_cache", *(row.missing_reason for row in OLD_LOGPROBS.methods.values())}))
"""All reasons that may occur in ``OldLogprobs.fallbacks``."""
