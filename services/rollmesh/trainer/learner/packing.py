"""Micro-batches without padding: sequences binned by length and concatenated, and the attention over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from rollmesh.kept_sets import join_sets, pad_sets
from rollmesh.trainer.learner.train_batch import TrainBatch
from rollmesh.types import Int32Array, KeptSets

Int64Array = npt.NDArray[np.int64]


def balanced_bins(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Distribute the indices of ``lengths`` over balanced bins of at most ``budget`` tokens.

    The number of bins is a multiple of ``multiple``. Each sequence, longest first, goes into the emptiest bin with
    enough room, or into a new bin. A sequence longer than the budget has a bin to itself. At most ``multiple - 1`` bins
    are empty; none with ``multiple`` 1. After AReaL's Algorithm 1 (arXiv 2505.24298), with tokens instead of sequences
    as the load.
    """
    if not lengths:
        return []
    # A sequence longer than the budget counts as one full bin, so there are at least as many sequences as bins.
    fewest = -(-sum(min(length, budget) for length in lengths) // budget)
    count = -(-fewest // multiple) * multiple
    while True:
        bins = _fill(lengths, budget, count)
        if len(bins) % multiple == 0:
            return bins
        count = -(-len(bins) // multiple) * multiple


def _fill(lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [b for b in range(len(bins)) if load[b] + lengths[index] <= budget or not bins[b]]
        if fits:
            target = min(fits, key=lambda b: (load[b], b))
        else:
            target = len(bins)
            bins.append([])
            load.append(0)
        bins[target].append(index)
        load[target] += lengths[index]
    return bins


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """Inputs of one forward pass: the packed row and the tokens to score."""

    input_ids: Tensor  # int64 [1, tokens]
    position_ids: Tensor  # int64 [1, tokens]
    layout: PackedLayout
    rows: Tensor  # int64 [scored], position whose hidden state predicts the scored token
    targets: Tensor  # int64 [scored]
    temperatures: Tensor | None  # float32 [scored]; None when all are 1
    kept: Tensor | None  # int64 [scored, largest set], ids of the kept sets, see pad_sets
    token_index: Int64Array  # [scored], index of the scored token in the flat batch
    sequence_index: Tensor  # int64 [scored], sequence inside the micro-batch
    sequence_count: int

    @property
    def token_count(self) -> int:
        """Number of tokens in the forward pass."""
        return self.input_ids.shape[1]


def pack(batch: TrainBatch, sequences: Sequence[int], device: torch.device) -> MicroBatch:
    """Concatenate these sequences of the batch; tokens that a policy wrote are scored.

    The last token of a sequence predicts no token and is dropped. Without sequences the result is a dummy of one token
    that scores nothing: a rank without work must still join the collectives.
    """
    pieces = [(np.zeros(2, np.int32), np.empty(0, np.int64), 0)]
    if sequences:
        bounds = [(int(batch.starts[s]), int(batch.starts[s + 1])) for s in sequences]
        pieces = [(batch.token_ids[a:b], np.flatnonzero(batch.policy_mask[a:b]), a) for a, b in bounds]
    temperatures = batch.temperatures[np.concatenate([scored + start for _, scored, start in pieces])]
    return _assemble(pieces, None if (temperatures == 1).all() else temperatures, batch.kept_sets, device)


def pack_sequences(
    sequences: Sequence[Int32Array],
    temperature: float,
    device: torch.device,
    kept_sets: Sequence[KeptSets | None] | None = None,
) -> MicroBatch:
    """Concatenate token ids; every token but the first of each sequence is scored, over its kept set if it has one."""
    starts = accumulate((len(ids) for ids in sequences), initial=0)
    pieces = [(ids, np.arange(1, len(ids)), start) for ids, start in zip(sequences, starts, strict=False)]
    scored = sum(len(ids) - 1 for ids in sequences)
    sets = join_sets((len(ids), each) for ids, each in zip(sequences, kept_sets or (), strict=False))
    return _assemble(pieces, None if temperature == 1 else np.full(scored, temperature, np.float32), sets, device)


def _assemble(
    pieces: Sequence[tuple[Int32Array, Int64Array, int]],
    temperatures: npt.NDArray[np.float32] | None,
    sets: KeptSets | None,
    device: torch.device,
) -> MicroBatch:
    """Pack the token ids of sequences, their scored positions, and the start of each in the flat batch."""
    lengths = [len(ids) - 1 for ids, _, _ in pieces]
    rows = [scored - 1 + at for (_, scored, _), at in zip(pieces, accumulate(lengths, initial=0), strict=False)]
    positions = np.concatenate([np.arange(n, dtype=np.int64) for n in lengths])
    token_index = np.concatenate([scored + start for _, scored, start in pieces])
    kept = pad_sets(sets, token_index)
    owners = np.repeat(np.arange(len(rows), dtype=np.int64), [len(r) for r in rows])

    def tensor(array: npt.NDArray[np.int64] | npt.NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(device)

    return MicroBatch(
        input_ids=tensor(np.concatenate([ids[:-1] for ids, _, _ in pieces]))[None],
        position_ids=tensor(positions)[None],
        layout=PackedLayout.of(lengths, device),
        rows=tensor(np.concatenate(rows)),
        targets=tensor(np.concatenate([ids[scored] for ids, scored, _ in pieces])),
        temperatures=None if temperatures is None else torch.from_numpy(temperatures).to(device),
        kept=None if kept is None else tensor(kept),
        token_index=token_index,
        sequence_index=tensor(owners),
        sequence_count=len(rows),
    )


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


AttentionInterface.register(PACKED_ATTENTION, packed_attention)


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
