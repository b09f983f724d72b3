"""UloRL's mask of well-mastered positive tokens (DMMPT)."""

from __future__ import annotations

from torch import Tensor

from rollmesh.algorithms.token_masks.mask_protocol import MaskInput


def mastered(data: MaskInput, *, entropy: float, probability: float) -> Tensor:
    """Mask the tokens with ``pi >= probability`` of right answers whose mean entropy is below ``entropy``.

    ``entropy`` in nats per token, over all tokens of the answer. Returns bool [tokens]. Source: UloRL
    (arXiv 2507.19766).
    """
    assert data.entropy is not None and data.policy_logprobs is not None
    low = data.sequence_mean(data.entropy)[data.sequence_index] < entropy
    return ~(data.solved & low & (data.policy_logprobs.exp() >= probability))
