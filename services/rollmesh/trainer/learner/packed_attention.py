"""Causal attention over a packed row: every token reads the tokens on its path through the prefix tree."""

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rollmesh.trainer.learner.prefix_tree import Branch, PrefixTree

PACKED_ATTENTION = "rollmesh_packed"
"""Name of the attention in transformers' registry."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedLayout:
    """Branches of a packed row, and the keys that each of them reads: those of its path, its own last."""

    branches: tuple[Branch, ...]
    lengths: tuple[int, ...]
    """Tokens of each branch."""
    reads: tuple[int, ...]
    """Keys of each branch."""
    key_rows: Tensor | None  # int64 [keys of all branches], rows of the keys; None if no token is shared
    offsets: Tensor  # int32 [branches + 1], on the device of the activations
    key_offsets: Tensor  # int32 [branches + 1]

    @classmethod
    def of(cls, tree: PrefixTree, device: torch.device) -> "PackedLayout":
        """Build the layout of a tree."""
        lengths = tuple(branch.end - branch.start for branch in tree.branches)
        reads = tuple(branch.depth + length for branch, length in zip(tree.branches, lengths, strict=True))
        rows = None
        if reads != lengths:
            paths = np.concatenate([tree.path(index) for index in range(len(lengths))])
            rows = torch.from_numpy(paths).to(device)

        def offsets(counts: tuple[int, ...]) -> Tensor:
            return torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device)

        return cls(
            branches=tree.branches,
            lengths=lengths,
            reads=reads,
            key_rows=rows,
            offsets=offsets(lengths),
            key_offsets=offsets(reads),
        )

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence."""
        return max(self.reads)


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
    device = query.device.type
    if torch.is_autocast_enabled(device):
        half = torch.get_autocast_dtype(device)
        query, key, value = query.to(half), key.to(half), value.to(half)
    window = sliding_window if sliding_window is not None and layout.longest > sliding_window else None
    if device == "cpu" and window is None and softcap is None and query.shape[-1] == value.shape[-1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = _repeated(key, repeats), _repeated(value, repeats)
        out: Tensor = _TreeAttention.apply(query, key, value, layout, scaling)  # type: ignore[no-untyped-call]
        return out.transpose(1, 2), None
    if layout.key_rows is not None:
        key, value = key[:, :, layout.key_rows], value[:, :, layout.key_rows]
    if query.is_cuda and query.dtype in (torch.bfloat16, torch.float16) and softcap is None:
        return _varlen(query, key, value, layout, scaling, window), None
    counts = (layout.lengths, layout.reads, layout.reads)
    parts = zip(*(torch.split(x, list(n), 2) for x, n in zip((query, key, value), counts, strict=True)), strict=True)
    return torch.cat([_causal(q, k, v, scaling, window, softcap) for q, k, v in parts], 2).transpose(1, 2), None


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


def _repeated(heads: Tensor, repeats: int) -> Tensor:
    """Repeat each head for its group of query heads."""
    return heads if repeats == 1 else heads[:, :, None].expand(-1, -1, repeats, -1, -1).flatten(1, 2)


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class _TreeAttention(torch.autograd.Function):
    """Attention on the CPU without a copy of shared keys: each branch attends to itself, and is read by what follows.

    The results of a token over the branches of its path are joined by the log of the sum of their weights (logsumexp),
    as flash attention joins its blocks. Its backward pass needs the joint result and logsumexp only. The kernel is that
    of ``scaled_dot_product_attention``, which does not return the logsumexp.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None
    ) -> Tensor:
        query, key, value = map(_dense, (query, key, value))
        lengths = list(layout.lengths)
        parts = zip(*(torch.split(x, lengths, 2) for x in (query, key, value)), strict=True)
        own = [_forward(q, k, v, 0.0, True, scale=scaling) for q, k, v in parts]
        out = torch.cat([o.transpose(1, 2) for o, _ in own], 1).transpose(1, 2)
        weight = torch.cat([w.transpose(1, 2) for _, w in own], 1).transpose(1, 2)
        for branch in layout.branches:
            if branch.stop > branch.end:
                k, v = _rows(branch.start, branch.end, key, value)
                q, joint, joint_weight = _rows(branch.end, branch.stop, query, out, weight)
                o, w = _forward(q, k, v, 0.0, False, scale=scaling)
                joint.lerp_(o, torch.sigmoid(w - joint_weight)[..., None].to(o.dtype))
                torch.logaddexp(joint_weight, w, out=joint_weight)
        ctx.save_for_backward(query, key, value, out, weight)
        ctx.layout, ctx.scaling = layout, scaling
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gradient, saved = _dense(gradients[0]), ctx.saved_tensors
        scaling, lengths = ctx.scaling, list(ctx.layout.lengths)
        parts = zip(*(torch.split(x, lengths, 2) for x in (gradient, *saved)), strict=True)
        own = [_backward(*part, 0.0, True, scale=scaling) for part in parts]
        query, key, value = (
            torch.cat([x.transpose(1, 2) for x in g], 1).transpose(1, 2) for g in zip(*own, strict=True)
        )
        for branch in ctx.layout.branches:
            if branch.stop > branch.end:
                before, after = slice(branch.start, branch.end), slice(branch.end, branch.stop)
                g, q, o, w = _rows(branch.end, branch.stop, gradient, saved[0], *saved[3:])
                k, v = _rows(branch.start, branch.end, *saved[1:3])
                more = _backward(g, q, k, v, o, w, 0.0, False, scale=scaling)
                for total, part, rows in zip((query, key, value), more, (after, before, before), strict=True):
                    total[:, :, rows] += part
        return query, key, value, None, None


def _dense(heads: Tensor) -> Tensor:
    """Return a tensor whose last dimension is contiguous, which the kernel takes for granted."""
    return heads if heads.stride(-1) == 1 else heads.contiguous()


def _rows(start: int, end: int, *tensors: Tensor) -> list[Tensor]:
    return [tensor[:, :, start:end] for tensor in tensors]


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, layout: PackedLayout, scaling: float | None, window: int | None
) -> Tensor:
    out = varlen_attn(
        query[0].transpose(0, 1).contiguous(),
        key[0].transpose(0, 1).contiguous(),
        value[0].transpose(0, 1).contiguous(),
        layout.offsets,
        layout.key_offsets,
        max(layout.lengths),
        layout.longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(out, Tensor)
    return out[None]


def _causal(
    query: Tensor, key: Tensor, value: Tensor, scaling: float | None, window: int | None, softcap: float | None
) -> Tensor:
    """Compute the attention of the last tokens of a sequence to all of its tokens."""
    tokens, keys = query.shape[2], key.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None and softcap is None and tokens == keys:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling, enable_gqa=grouped)
    position = torch.arange(keys, device=query.device)
    distance = position[keys - tokens :, None] - position[None, :]
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
