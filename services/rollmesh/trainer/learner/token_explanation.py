"""Explanation of the loss weight of each token: version, ratio, weight, and the effect of the clip or the mask."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from rollmesh.algorithms.losses import TokenLoss
from rollmesh.trainer.learner.train_batch import TrainBatch
from rollmesh.types import Float64Array, Int64Array

_CLIP_WORDS = ("trained", "clipped_high", "clipped_low", "clipped_dual", "weight_truncated")
"""By ``ClipReason``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenExplanation:
    """Explanation of one response token. Numbers are 0 where ``policy_version`` is None."""

    trajectory_id: str
    position: int
    """Index from the first response token."""
    token_id: int
    policy_version: int | None
    """Version that wrote the token; None if the environment wrote it."""
    staleness: int
    """Train steps."""
    pure: bool
    behavior_logprob: float
    teacher_logprob: float | None
    """None unless the step reads the columns of teachers."""
    old_logprob: float
    old_logprob_fallback: str
    """Reason that ``old_logprob`` is the sampler's instead of the configured source's; empty if it is the source's."""
    logprob: float
    ratio: float
    advantage: float
    weight: float
    """Weight of the token: it pushes its log-probability by weight * advantage / (divisor of the aggregation)."""
    reason: str
    """One of trained, clipped_high, clipped_low, clipped_dual, weight_truncated, zero_advantage, stale, environment,
    the name of a mask, or own for a mask of a user's code."""


def explain_tokens(
    batch: TrainBatch,
    logprobs: Float64Array,
    old_logprobs: Float64Array,
    fell_back: Mapping[str, Tensor],
    index: Int64Array,
    judged: TokenLoss,
) -> Iterator[TokenExplanation]:
    """Explain every response token, in the order of the batch.

    ``logprobs``, ``old_logprobs`` and ``fell_back`` (by reason) are [tokens] of the flat batch. ``judged`` is the loss
    of the policy tokens, whose indices in the flat batch are ``index`` [policy tokens].
    """
    ratio, weight = np.zeros(len(batch.token_ids)), np.zeros(len(batch.token_ids))
    clip = np.zeros(len(batch.token_ids), np.int8)
    ratio[index], weight[index], clip[index] = judged.ratio.numpy(), judged.weight.numpy(), judged.clip.numpy()
    fallback = np.full(len(batch.token_ids), "", object)
    for reason, column in fell_back.items():
        fallback[column.numpy()] = reason
    positions = np.arange(len(batch.token_ids)) - (batch.starts[:-1] + batch.prompt_lengths)[batch.sequence_index]
    masked_by = np.full(len(batch.token_ids), "", object)
    for mask, tokens in batch.masked_by.items():
        masked_by[tokens] = mask
    advantages, teacher = batch.token_advantages, batch.teacher
    for t in np.flatnonzero(positions >= 0):
        s = batch.sequence_index[t]
        written, trained = bool(batch.policy_mask[t]), bool(batch.loss_mask[t])
        advantage = float(advantages[t])
        judged_as = "zero_advantage" if advantage == 0 else _CLIP_WORDS[clip[t]]
        yield TokenExplanation(
            trajectory_id=batch.trajectory_ids[s],
            position=int(positions[t]),
            token_id=int(batch.token_ids[t]),
            policy_version=int(batch.versions[t]) if written else None,
            staleness=int(batch.staleness[t]),
            pure=bool(batch.pure[t]),
            behavior_logprob=float(batch.behavior_logprobs[t]),
            teacher_logprob=None if teacher is None else float(teacher.logprobs[t]),
            old_logprob=float(old_logprobs[t]) if written else 0.0,
            old_logprob_fallback=str(fallback[t]),
            logprob=float(logprobs[t]) if written else 0.0,
            ratio=float(ratio[t]),
            advantage=advantage if written else 0.0,
            weight=float(weight[t]) if trained else 0.0,
            reason=(masked_by[t] or judged_as) if written else "environment",
        )
