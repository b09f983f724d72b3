"""Log-probability and entropy of selected tokens from hidden states, without storing all logits."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

LOGIT_ELEMENTS = 1 << 24
"""Logits in memory at once. More are computed in chunks, and recomputed in the backward pass."""


def score_tokens(
    hidden: Tensor,
    head: Callable[[Tensor], Tensor],
    targets: Tensor,
    temperatures: Tensor | None,
    vocab_size: int,
    *,
    entropy: bool,
    limit: int = LOGIT_ELEMENTS,
) -> tuple[Tensor, Tensor]:
    """Compute ``log_softmax(z / T)`` of the target and the entropy of that distribution, in nats.

    ``hidden`` float [tokens, width], ``targets`` int64 [tokens], ``temperatures`` float [tokens] or None for T = 1.
    Returns (logprobs [tokens], entropy [tokens]), float32 unless the logits are float64. The entropy has no gradient,
    and is 0 unless ``entropy`` is set.
    """
    rows = max(1, limit // vocab_size)
    if len(targets) <= rows:
        return _score(hidden, targets, temperatures, head, entropy)
    scores: list[tuple[Tensor, Tensor]] = []
    for start in range(0, len(targets), rows):
        stop = start + rows
        chunk = (
            hidden[start:stop],
            targets[start:stop],
            None if temperatures is None else temperatures[start:stop],
            head,
            entropy,
        )
        recompute = torch.is_grad_enabled()
        scores.append(checkpoint(_score, *chunk, use_reentrant=False) if recompute else _score(*chunk))
    return torch.cat([s[0] for s in scores]), torch.cat([s[1] for s in scores])


def _score(
    hidden: Tensor, targets: Tensor, temperatures: Tensor | None, head: Callable[[Tensor], Tensor], entropy: bool
) -> tuple[Tensor, Tensor]:
    return score_logits(head(hidden), targets, temperatures, entropy=entropy)


def score_logits(
    logits: Tensor, targets: Tensor, temperatures: Tensor | None, *, entropy: bool
) -> tuple[Tensor, Tensor]:
    """Compute the scores of ``score_tokens`` from logits [tokens, vocab]."""
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if temperatures is not None:
        scaled = scaled / temperatures[:, None].to(scaled.dtype)
    distribution = scaled.log_softmax(-1)
    logprobs = distribution.gather(-1, targets[:, None])[:, 0]
    if not entropy:
        return logprobs, torch.zeros_like(logprobs)
    with torch.no_grad():
        return logprobs, torch.special.entr(distribution.exp()).sum(-1)
