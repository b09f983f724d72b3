"""Attention over packed sequences: concatenated along the token dimension, isolated from each other.

It is registered with transformers' attention interface, so any model that uses the interface is packed without a code
change. No block mask is built. On CUDA in half precision the kernel takes the offsets (torch's varlen attention).
Otherwise each sequence is one call of scaled_dot_product_attention.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

PACKED_ATTENTION = "rollmesh_packed"
"""Name of the attention in transformers' registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Boundaries of the sequences in a packed row."""

    lengths: tuple[int, ...]
    offsets: Tensor  # int32 [sequences + 1], on the device of the activations

    @classmethod
    def of(cls, lengths: Sequence[int], device: torch.device) -> PackedLayout:
        """Build the layout of concatenated sequences of these lengths."""
        offsets = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device)
        return cls(lengths=tuple(lengths), offsets=offsets)


def register_packed_attention() -> None:
    """Register the packed attention with transformers. Idempotent."""
    AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    layout: PackedLayout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each sequence of ``layout``.

    ``query`` is [1, heads, tokens, head_dim]; ``key`` and ``value`` have kv_heads. The result is
    [1, tokens, heads, head_dim]. ``softcap`` bounds the scores by ``softcap * tanh(scores / softcap)``.
    ``sliding_window`` is the number of tokens that a token attends to, including itself. Raises ValueError for
    attention sinks (``s_aux``), for attention that is not causal, and for a missing layout, which means that the model
    dropped the argument.
    """
    name = type(module).__name__
    if s_aux is not None:
        raise ValueError(f"{name}: attention sinks are not supported by packed attention")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        raise ValueError(f"{name} is not causal: a token attends to later tokens")
    if layout is None:
        raise ValueError(f"{name} drops its attention arguments: the boundaries of packed sequences are lost")
    if query.is_cuda and torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = query.to(half), key.to(half), value.to(half)
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return _varlen(query, key, value, layout, scaling, sliding_window), None
    lengths = list(layout.lengths)
    pieces = [
        _causal(q, k, v, scaling, sliding_window, softcap)
        for q, k, v in zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
    ]
    return torch.cat(pieces, 2).transpose(1, 2), None


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, sliding_window: int | None
) -> Tensor:
    longest = max(layout.lengths)
    out = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        layout.offsets,
        layout.offsets,
        longest,
        longest,
        scale=scaling,
        window_size=(-1 if sliding_window is None else sliding_window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    sliding_window: int | None,
    softcap: float | None,
) -> Tensor:
    tokens = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    window = sliding_window if sliding_window is not None and tokens > sliding_window else None
    if window is None and softcap is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    position = torch.arange(tokens, device=query.device)
    distance = position[:, None] - position[None, :]
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, visible, scale=scaling, enable_gqa=grouped)
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    return scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value
