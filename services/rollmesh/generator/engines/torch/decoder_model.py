"""The forward pass of Qwen2, Qwen3 and Llama over packed weights: prefill, one decode step, scoring."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollmesh.generator.engines.torch.adapters import BASE, AdapterRows, AdapterStack
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kernels import (
    Int64Array,
    Multiply,
    NumpyMultiply,
    Operand,
    as_pairs,
    fastest_multiply,
    rotate_,
    rotation_table,
    unit_norm,
)
from rollmesh.generator.engines.torch.kv_cache import Tier
from rollmesh.generator.engines.torch.weights import Layer, Weights

_LOGIT_ROWS = 1024
"""Maximum number of positions scored at once; limits the [positions, vocab] block."""

_SHORT_CONTEXT = 512
"""Longest context whose full score matrix is computed in prefill, if numpy multiplies."""

BoundLayer = tuple[Layer, Operand, Operand, Operand, Operand]
"""A layer and the operands of its four matrices: qkv, output, gate_up, down."""


class DecoderModel:
    """Forward pass over packed weights; the caller owns the caches. Not safe for concurrent use."""

    def __init__(
        self,
        arch: Architecture,
        weights: Weights,
        positions: int,
        device: torch.device,
        *,
        swap_in_place: bool,
        adapters: AdapterStack | None = None,
    ) -> None:
        """Bind the weights; with ``swap_in_place``, ``swap`` copies into the tensors in use.

        ``adapters`` are applied above the weights, each to the rows that use it.
        """
        self.arch = arch
        self.adapters = adapters
        self._swap_in_place = swap_in_place
        self.device = device
        self.weights = weights
        self.multiply: Multiply = fastest_multiply(weights.layers[0].gate_up, arch.head_size)
        self._rotations = rotation_table(arch.rope, arch.head_size, positions, device)
        self._floor = torch.tensor(math.sqrt(arch.hidden_size * arch.norm_eps), device=device)
        self._head_floor = torch.tensor(math.sqrt(arch.head_size * arch.norm_eps), device=device)
        self._zero = torch.zeros((), dtype=weights.embedding.dtype, device=device)
        short = _SHORT_CONTEXT if isinstance(self.multiply, NumpyMultiply) else 0
        self._causal = torch.full((short, short), -torch.inf, device=device).triu(1)
        self._scale = arch.head_size**-0.5
        self.forward_tokens = 256 if device.type == "cpu" else 8192
        """Tokens of one pass of prefill or scoring; 256 fit in the cache of a CPU."""
        self._bind(weights)

    def swap(self, weights: Weights) -> None:
        """Replace the weights by others of the same architecture, from the next call on.

        On a GPU they are copied into the tensors in use. This needs no second copy in GPU memory and keeps all
        addresses, so captured graphs compute with the new weights.
        """
        if not self._swap_in_place:
            self._bind(weights)
            return
        for old, new in zip(self.weights.tensors(), weights.tensors(), strict=True):
            old.copy_(new, non_blocking=True)

    def with_weights(self, weights: Weights) -> DecoderModel:
        """Return a model that computes the same with other weights of the same architecture and device.

        ``score`` of the two models may run at the same time as any method of the other.
        """
        other = copy.copy(self)
        other._bind(weights)
        return other

    def decode(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        """Append one token to every row and advance the plan; returns the logits [rows, vocab], a reused buffer."""
        multiply, x, adapters = self.multiply, plan.states, self.adapters
        adapted = None if adapters is None else adapters.rows_in_order(len(x))
        torch.index_select(self.weights.embedding, 0, tokens, out=x)
        rotations = self._rotations.index_select(0, plan.positions).unsqueeze(1)
        for tier in plan.tiers:
            tier.mask.index_put_(tier.place, self._zero)
        for number, (layer, qkv, output, gate_up, down) in enumerate(self._layers):
            unit_norm(x, self._floor, plan.normed)
            multiply(plan.normed_op, qkv, plan.qkv_op)
            self._adapt_(plan.qkv, number, "qkv", plan.normed, adapted)
            if layer.qkv_bias is not None:
                plan.qkv.add_(layer.qkv_bias)
            self._norm_heads_(plan.heads, layer)
            if plan.pairs is not None:
                plan.pairs.mul_(rotations)
            else:
                rotate_(plan.heads, rotations)
            for tier in plan.tiers:
                self._attend(tier, number)
            multiply(plan.attended_op, output, plan.change_op)
            self._adapt_(plan.change, number, "output", plan.attended, adapted)
            x.add_(plan.change)
            if layer.output_bias is not None:
                x.add_(layer.output_bias)
            unit_norm(x, self._floor, plan.normed)
            multiply(plan.normed_op, gate_up, plan.gate_up_op)
            self._adapt_(plan.gate_up, number, "gate_up", plan.normed, adapted)
            torch.mul(F.silu(plan.gate), plan.up, out=plan.gated)
            multiply(plan.gated_op, down, plan.change_op)
            self._adapt_(plan.change, number, "down", plan.gated, adapted)
            x.add_(plan.change)
        plan.counters.add_(1)
        unit_norm(x, self._floor, plan.normed).mul_(self.weights.norm)
        multiply(plan.normed_op, self._head, plan.logits_op)
        return plan.logits

    def prefill(
        self, tokens: Tensor, places: Int64Array | None = None, past: Past | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the cache of right-padded contexts, tokens int64 [batch, length], which continue ``past``.

        ``places`` [batch] are the places of the contexts' adapters; None is the base.

        Returns keys [layers, batch, kv_heads, head_size, length] and values [layers, batch, kv_heads, length,
        head_size]; positions after a context's end are undefined.
        """
        arch, like, (batch, length) = self.arch, self.weights.embedding, tokens.shape
        keys = like.new_empty((arch.layer_count, batch, arch.kv_head_count, arch.head_size, length))
        values = like.new_empty((arch.layer_count, batch, arch.kv_head_count, length, arch.head_size))
        self._forward(tokens, places, into=(keys, values), past=past)
        return keys, values

    def score(self, tokens: Tensor, place: int = BASE) -> Tensor:
        """Compute log_softmax at T=1 of each token after the first, float32 [batch, length - 1].

        ``place`` is the place of an adapter.
        """
        batch, length = tokens.shape
        x = self._forward(tokens, np.full(batch, place))
        states = unit_norm(x, self._floor).mul_(self.weights.norm).view(batch, length, -1)[:, :-1].flatten(0, 1)
        targets = tokens[:, 1:].flatten()
        parts = []
        for rows, wanted in zip(torch.split(states, _LOGIT_ROWS), torch.split(targets, _LOGIT_ROWS), strict=True):
            logits = self._product(rows, self._head, self.arch.vocab_size)
            parts.append(torch.log_softmax(logits.float(), dim=-1).gather(1, wanted.unsqueeze(1)).squeeze(1))
        return torch.cat(parts).view(batch, length - 1)

    def _bind(self, weights: Weights) -> None:
        op = self.multiply.operand
        self.weights = weights
        self._head = op(weights.head)
        self._layers: list[BoundLayer] = [
            (layer, op(layer.qkv), op(layer.output), op(layer.gate_up), op(layer.down)) for layer in weights.layers
        ]

    def _product(self, x: Tensor, matrix: Operand, width: int) -> Tensor:
        out = x.new_empty((len(x), width))
        self.multiply(self.multiply.operand(x), matrix, self.multiply.operand(out))
        return out

    def _adapt_(self, out: Tensor, block: int, matrix: str, x: Tensor, adapted: AdapterRows | None) -> None:
        """Add the adapters' share of a product; ``adapted`` is None without adapters."""
        if self.adapters is not None and adapted is not None:
            self.adapters.add_(out, block, matrix, x, adapted)

    def _forward(
        self,
        tokens: Tensor,
        places: Int64Array | None = None,
        into: tuple[Tensor, Tensor] | None = None,
        past: Past | None = None,
    ) -> Tensor:
        """Return the last hidden states [batch * length, hidden]; with ``into``, stop at the last keys and values."""
        arch = self.arch
        batch, length = tokens.shape
        kv, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size
        adapted = None
        if self.adapters is not None and places is not None and (places != BASE).any():
            adapted = self.adapters.select(np.repeat(places, length))
        x = self.weights.embedding.index_select(0, tokens.flatten())
        mask = None if past is None else past.mask(length)
        positions = torch.arange(length, device=self.device).expand(batch, length)
        if past is not None:  # those of padding may be too large
            positions = (positions + past.lengths[:, None]).clamp(max=len(self._rotations) - 1)
        rotations = self._rotations.index_select(0, positions.flatten()).unsqueeze(1)
        for number, (layer, qkv, output, gate_up, down) in enumerate(self._layers):
            normed = unit_norm(x, self._floor)
            mixed = self._product(normed, qkv, kv * (group + 2) * size)
            self._adapt_(mixed, number, "qkv", normed, adapted)
            if layer.qkv_bias is not None:
                mixed.add_(layer.qkv_bias)
            mixed = mixed.view(batch * length, kv, group + 2, size)
            self._norm_heads_(mixed[:, :, : group + 1], layer)
            rotate_(mixed[:, :, : group + 1], rotations)
            heads = mixed.view(batch, length, kv, group + 2, size).permute(0, 2, 3, 1, 4)
            keys, values = heads[:, :, group], heads[:, :, group + 1]  # [batch, kv, length, d]
            if into is not None:
                into[0][number], into[1][number] = keys.transpose(2, 3), values
                if number == arch.layer_count - 1:
                    break
            if past is not None:
                keys = torch.cat((past.keys[number].transpose(2, 3), keys), 2)
                values = torch.cat((past.values[number], values), 2)
            attended = self._attend_causally(heads[:, :, :group], keys, values, mask)
            mixed = attended.permute(0, 3, 1, 2, 4).reshape(batch * length, -1)
            change = self._product(mixed, output, arch.hidden_size)
            self._adapt_(change, number, "output", mixed, adapted)
            x.add_(change)
            if layer.output_bias is not None:
                x.add_(layer.output_bias)
            normed = unit_norm(x, self._floor)
            mixed = self._product(normed, gate_up, 2 * arch.mlp_size)
            self._adapt_(mixed, number, "gate_up", normed, adapted)
            gate, up = mixed.chunk(2, dim=-1)
            gated = F.silu(gate).mul_(up)
            change = self._product(gated, down, arch.hidden_size)
            self._adapt_(change, number, "down", gated, adapted)
            x.add_(change)
        return x

    def _attend_causally(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend within contexts: queries [batch, kv, g, length, d], keys and values [batch, kv, length, d].

        With ``mask``, keys and values have further positions before those of the queries.

        torch's fused kernel is slow for short contexts on a CPU. Full score matrices are cheaper there, with all
        queries of a kv head in one product.
        """
        batch, kv, group, length, size = queries.shape
        total = keys.shape[2]
        if total > len(self._causal):
            attended = F.scaled_dot_product_attention(
                queries.flatten(1, 2),
                keys.repeat_interleave(group, dim=1) if group > 1 else keys,
                values.repeat_interleave(group, dim=1) if group > 1 else values,
                attn_mask=None if mask is None else mask[:, 0],
                is_causal=mask is None,
            )
            return attended.view(batch, kv, group, length, size)
        op, stacked = self.multiply.operand, queries.reshape(batch, kv, group * length, size)
        scores = queries.new_empty((batch, kv, group * length, total))
        self.multiply(op(stacked), op(keys.transpose(2, 3)), op(scores))
        by_head = scores.view(batch, kv, group, length, total)
        masked = self._causal[:length, :length] if mask is None else mask
        torch.add(masked, by_head, alpha=self._scale, out=by_head)
        self.multiply(op(torch.softmax(scores, -1)), op(values), op(stacked))
        return stacked.view(batch, kv, group, length, size)

    def _norm_heads_(self, heads: Tensor, layer: Layer) -> None:
        if layer.qk_norm is not None:  # heads [rows, kv, g + 1, d]
            heads.copy_(unit_norm(heads, self._head_floor).mul_(layer.qk_norm))

    def _attend(self, tier: TierPlan, number: int) -> None:
        multiply = self.multiply
        tier.keys[number].index_put_(tier.place, tier.new_key)
        tier.values[number].index_put_(tier.place, tier.new_value)
        multiply(tier.query_op, tier.span_key_ops[number], tier.scores_op)
        torch.add(tier.span_mask, tier.scores, alpha=self._scale, out=tier.scores)
        torch.softmax(tier.scores, -1, out=tier.shares)
        multiply(tier.shares_op, tier.span_value_ops[number], tier.attended_op)


class Past(NamedTuple):
    """Cached beginnings of contexts that a prefill continues, right-padded with zeros to n tokens."""

    keys: Tensor
    """[layers, batch, kv_heads, head_size, n]"""
    values: Tensor
    """[layers, batch, kv_heads, n, head_size]"""
    lengths: Tensor
    """Tokens of each beginning, int64 [batch]."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> Past:
        """Put keys [layers, kv_heads, head_size, tokens] and values [layers, kv_heads, tokens, head_size] together."""
        lengths = [keys.shape[-1] for keys, _ in parts]
        (layers, heads, size, _), like = parts[0][0].shape, parts[0][0]
        keys = like.new_zeros((layers, len(parts), heads, size, max(lengths)))
        values = like.new_zeros((layers, len(parts), heads, max(lengths), size))
        for row, (length, (row_keys, row_values)) in enumerate(zip(lengths, parts, strict=True)):
            keys[:, row, ..., :length], values[:, row, :, :length] = row_keys, row_values
        return cls(keys, values, torch.tensor(lengths, device=like.device))

    def mask(self, length: int) -> Tensor:
        """Return the additive mask of ``length`` tokens after the past: [batch, 1, 1, length, n + length]."""
        batch, most = len(self.lengths), self.keys.shape[-1]
        device = self.keys.device
        cached = (torch.arange(most, device=device) < self.lengths[:, None])[:, None].expand(batch, length, most)
        new = torch.ones((length, length), dtype=torch.bool, device=device).tril().expand(batch, length, length)
        seen = torch.cat((cached, new), 2)
        return self.keys.new_zeros(seen.shape).masked_fill_(~seen, -torch.inf)[:, None, None]


class TierShare(NamedTuple):
    """Part of one tier in a step: its first rows, over the first ``span`` tokens."""

    tier: Tier
    rows: int
    span: int


class StepBuffers:
    """Memory of decode steps, of the model's type and device; plans are views of it."""

    def __init__(self, model: DecoderModel, row_count: int, *, shared_score_tokens: int = 0) -> None:
        """Allocate buffers for plans of at most ``row_count`` rows.

        All plans share one buffer for attention scores of at most ``shared_score_tokens`` (rows * span of a tier); 0
        gives each plan its own buffer.
        """
        arch, like = model.arch, model.weights.embedding
        self.arch = arch
        self.operand = model.multiply.operand
        self.states, self.normed, self.change = (like.new_empty((row_count, arch.hidden_size)) for _ in range(3))
        self.qkv = like.new_empty((row_count, arch.kv_head_count, arch.heads_per_kv + 2, arch.head_size))
        self.attended = like.new_empty((row_count, arch.kv_head_count, arch.heads_per_kv, arch.head_size))
        self.gate_up = like.new_empty((row_count, 2 * arch.mlp_size))
        self.gated = like.new_empty((row_count, arch.mlp_size))
        self.logits = like.new_empty((row_count, arch.vocab_size))
        self.rows = torch.arange(row_count * arch.kv_head_count, device=like.device)
        self._scores = like.new_empty((2, shared_score_tokens * arch.head_count))

    def counters(self, lengths: Int64Array) -> Tensor:
        """Return the next position of every row and kv head, int64 [rows * kv_heads]."""
        return torch.from_numpy(np.repeat(lengths, self.arch.kv_head_count)).to(self.rows.device)

    def scores(self, *shape: int) -> Tensor:
        """Return memory for scores and their softmax, [2, ...]."""
        if not self._scores.numel():
            return self.qkv.new_empty((2, *shape))
        return self._scores[:, : math.prod(shape)].view(2, *shape)


class DecodePlan:
    """Views of the memory that one decode step reads and writes, except weights; reused until the rows change.

    Attributes named ``..._op`` are operands of the model's ``Multiply`` over the memory of the tensor before them.
    """

    def __init__(self, buffers: StepBuffers, shares: Sequence[TierShare], counters: Tensor) -> None:
        """Plan a step for these shares of the tiers; it advances ``counters`` [rows * kv_heads]."""
        arch, op, count = buffers.arch, buffers.operand, sum(share.rows for share in shares)
        starts = accumulate((share.rows for share in shares), initial=0)
        self.tiers = [TierPlan(buffers, share, at, counters) for share, at in zip(shares, starts, strict=False)]
        self.counters = counters  # int64 [rows * kv_heads], next position of each: advanced by one a step
        self.positions = counters[:: arch.kv_head_count]  # int64 [rows]
        self.states = buffers.states[:count]  # [rows, hidden], the residual stream
        self.normed = buffers.normed[:count]  # [rows, hidden]
        self.normed_op = op(self.normed)
        self.qkv = buffers.qkv[:count].view(count, -1)  # [rows, kv_heads * (g + 2) * d]
        self.qkv_op = op(self.qkv)
        self.heads = buffers.qkv[:count, :, : arch.heads_per_kv + 1]  # [rows, kv_heads, g + 1, d], queries and keys
        # The same as complex pairs, [rows, kv_heads, g + 1, d / 2]; float32 only.
        self.pairs = as_pairs(self.heads) if self.heads.dtype == torch.float32 else None
        self.attended = buffers.attended[:count].view(count, -1)  # [rows, heads * d]
        self.attended_op = op(self.attended)
        self.gate_up = buffers.gate_up[:count]  # [rows, 2 * mlp]
        self.gate_up_op = op(self.gate_up)
        self.gate, self.up = self.gate_up[:, : arch.mlp_size], self.gate_up[:, arch.mlp_size :]  # [rows, mlp] each
        self.gated = buffers.gated[:count]  # [rows, mlp]
        self.gated_op = op(self.gated)
        self.change = buffers.change[:count]  # [rows, hidden], added to the residual stream by a block
        self.change_op = op(self.change)
        self.logits = buffers.logits[:count]  # [rows, vocab]
        self.logits_op = op(self.logits)


class TierPlan:
    """Views of one tier in a step. n = rows in use * kv_heads, g = query heads per kv head, d = head size."""

    def __init__(self, buffers: StepBuffers, share: TierShare, start: int, counters: Tensor) -> None:
        """Plan a tier's share, whose first row is row ``start`` of the step."""
        arch, op, (tier, rows, span) = buffers.arch, buffers.operand, share
        heads, group, stop = arch.kv_head_count, arch.heads_per_kv, start + rows
        used = rows * heads
        qkv = buffers.qkv[start:stop].view(used, group + 2, arch.head_size)
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values, mask = tier.keys[:, :used], tier.values[:, :used], tier.mask[:used]
        # int64 [n] each: row and position that this step writes
        self.place = buffers.rows[:used], counters[start * heads : stop * heads]
        self.keys = keys.transpose(2, 3).unbind(0)  # per layer [n, width, d], to write by place
        self.values = values.unbind(0)  # per layer [n, width, d]
        self.mask = mask[:, 0]  # [n, width]
        self.new_key, self.new_value = qkv[:, group], qkv[:, group + 1]  # [n, d] each
        self.query_op = op(qkv[:, :group])  # [n, g, d]
        self.span_key_ops = tuple(op(layer) for layer in keys[..., :span].unbind(0))  # per layer [n, d, span]
        self.span_value_ops = tuple(op(layer) for layer in values[:, :, :span].unbind(0))  # per layer [n, span, d]
        self.span_mask = mask[..., :span]  # [n, 1, span]
        self.scores, self.shares = buffers.scores(used, group, span)  # [n, g, span] each, and softmax of the scores
        self.scores_op, self.shares_op = op(self.scores), op(self.shares)
        self.attended_op = op(buffers.attended[start:stop].view(used, group, arch.head_size))  # [n, g, d]


def prefill_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Group indices of ``lengths`` into batches, longest first, of at most ``token_budget`` tokens with padding.

    A single context longer than the budget is a separate batch.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if not batches or (len(batches[-1]) + 1) * width > token_budget:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
