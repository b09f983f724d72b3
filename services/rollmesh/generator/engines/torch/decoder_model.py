"""The forward pass of Qwen2, Qwen3 and Llama over packed weights: prefill, one decode step, scoring."""

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from rollmesh.generator.engines.torch.adapters import BASE, AdapterRows, AdapterStack
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.decode_plan import DecodePlan, StepBuffers
from rollmesh.generator.engines.torch.kernels import (
    Int64Array,
    Multiply,
    NumpyMultiply,
    Operand,
    fastest_multiply,
    rotate_,
    rotation_table,
    unit_norm,
)
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

    def with_weights(self, weights: Weights) -> "DecoderModel":
        """Return a model that computes the same with other weights of the same architecture and device.

        ``score`` of the two models may run at the same time as any method of the other.
        """
        other = copy.copy(self)
        other._bind(weights)
        return other

    def step_buffers(self, row_count: int, longest: int, score_count: int) -> StepBuffers:
        """Allocate memory of decode steps of this model."""
        like, operand = self.weights.embedding, self.multiply.operand
        return StepBuffers(self.arch, like, operand, row_count, longest, score_count)

    def decode(self, tokens: Tensor, plan: DecodePlan) -> Tensor:
        """Append the plan's tokens, int64 [tokens], to the rows; returns the logits [tokens, vocab], a reused buffer.

        A plan of one token a row moves on by it.
        """
        multiply, views, adapters = self.multiply, plan.views, self.adapters
        x = views.states
        adapted = None if adapters is None else adapters.rows_in_order(len(x))
        torch.index_select(self.weights.embedding, 0, tokens, out=x)
        rotations = self._rotations.index_select(0, plan.positions).unsqueeze(1)
        for tier in plan.tiers:
            tier.begin()
        for number, (layer, qkv, output, gate_up, down) in enumerate(self._layers):
            unit_norm(x, self._floor, views.normed)
            multiply(views.normed_op, qkv, views.qkv_op)
            self._adapt_(views.qkv, number, "qkv", views.normed, adapted)
            if layer.qkv_bias is not None:
                views.qkv.add_(layer.qkv_bias)
            self._norm_heads_(views.heads, layer)
            if views.pairs is not None:
                views.pairs.mul_(rotations)
            else:
                rotate_(views.heads, rotations)
            for tier in plan.tiers:
                tier.attend(multiply, number, self._scale)
            multiply(views.attended_op, output, views.change_op)
            self._adapt_(views.change, number, "output", views.attended, adapted)
            x.add_(views.change)
            if layer.output_bias is not None:
                x.add_(layer.output_bias)
            unit_norm(x, self._floor, views.normed)
            multiply(views.normed_op, gate_up, views.gate_up_op)
            self._adapt_(views.gate_up, number, "gate_up", views.normed, adapted)
            torch.mul(F.silu(views.gate, inplace=True), views.up, out=views.gated)
            multiply(views.gated_op, down, views.change_op)
            self._adapt_(views.change, number, "down", views.gated, adapted)
            x.add_(views.change)
        if plan.width == 1:
            plan.counters.add_(1)
        unit_norm(x, self._floor, views.normed)
        multiply(views.normed_op, self._head, views.logits_op)
        return views.logits

    def prefill(
        self, tokens: Tensor, places: Int64Array | None = None, past: "Past | None" = None
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
        states = unit_norm(x, self._floor).view(batch, length, -1)[:, :-1].flatten(0, 1)
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
        past: "Past | None" = None,
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


class Past(NamedTuple):
    """Cached beginnings of contexts that a prefill continues, right-padded with zeros to n tokens."""

    keys: Tensor
    """[layers, batch, kv_heads, head_size, n]"""
    values: Tensor
    """[layers, batch, kv_heads, n, head_size]"""
    lengths: Tensor
    """Tokens of each beginning, int64 [batch]."""

    @classmethod
    def of(cls, parts: Sequence[tuple[Tensor, Tensor]]) -> "Past":
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
