"""What one decode step reads and writes: buffers, views of them and of the cache, and plans that join both."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kernels import Int64Array, Multiply, Operand, as_pairs
from rollmesh.generator.engines.torch.kv_cache import Tier
from rollmesh.generator.engines.torch.sampling import BoolArray


class TierShare(NamedTuple):
    """Part of one tier in a step: its first rows, over the first ``span`` tokens."""

    tier: Tier
    rows: int
    span: int


class StepBuffers:
    """Memory of decode steps; plans are views of it."""

    def __init__(
        self,
        arch: Architecture,
        like: Tensor,
        operand: Callable[[Tensor], Operand],
        row_count: int,
        *,
        shared_score_tokens: int = 0,
    ) -> None:
        """Allocate buffers of the type and device of ``like`` for plans of at most ``row_count`` tokens.

        Plans share one buffer for attention scores of at most ``shared_score_tokens`` (tokens of a step * span of a
        tier); a plan with more has its own.
        """
        self.arch = arch
        self.operand = operand
        self.states, self.normed, self.change = (like.new_empty((row_count, arch.hidden_size)) for _ in range(3))
        self.qkv = like.new_empty((row_count, arch.kv_head_count, arch.heads_per_kv + 2, arch.head_size))
        self.attended = like.new_empty((row_count, arch.kv_head_count, arch.heads_per_kv, arch.head_size))
        self.gate_up = like.new_empty((row_count, 2 * arch.mlp_size))
        self.gated = like.new_empty((row_count, arch.mlp_size))
        self.logits = like.new_empty((row_count, arch.vocab_size))
        self.rows = torch.arange(row_count * arch.kv_head_count, device=like.device)
        self.counters = torch.zeros_like(self.rows)
        """Position of every token and kv head of the current step."""
        self._views: dict[int, TokenViews] = {}
        self._scores = like.new_empty((2, shared_score_tokens * arch.head_count))

    def place(self, positions: Int64Array) -> None:
        """Set the positions of the next step's tokens, [tokens]."""
        heads = self.arch.kv_head_count
        self.counters[: len(positions) * heads].copy_(torch.from_numpy(np.repeat(positions, heads)))

    def views(self, count: int) -> TokenViews:
        """Return the views of the first ``count`` rows of the buffers."""
        if count not in self._views:
            self._views[count] = TokenViews(self, count)
        return self._views[count]

    def shares_scores(self, count: int) -> bool:
        """Tell whether so many scores fit in the buffer of all plans."""
        return count <= self._scores.shape[1]

    def scores(self, *shape: int) -> Tensor:
        """Return memory for scores and their softmax, [2, ...]."""
        if not self.shares_scores(math.prod(shape)):
            return self.qkv.new_empty((2, *shape))
        return self._scores[:, : math.prod(shape)].view(2, *shape)


class TokenViews:
    """Views of the buffers for a number of tokens.

    Attributes named ``..._op`` are operands of the model's ``Multiply`` over the memory of the tensor before them.
    """

    def __init__(self, buffers: StepBuffers, count: int) -> None:
        arch, op = buffers.arch, buffers.operand
        self.states = buffers.states[:count]  # [tokens, hidden], the residual stream
        self.normed = buffers.normed[:count]  # [tokens, hidden]
        self.normed_op = op(self.normed)
        self.qkv = buffers.qkv[:count].view(count, -1)  # [tokens, kv_heads * (g + 2) * d]
        self.qkv_op = op(self.qkv)
        self.heads = buffers.qkv[:count, :, : arch.heads_per_kv + 1]  # [tokens, kv_heads, g + 1, d], queries and keys
        # The same as complex pairs, [tokens, kv_heads, g + 1, d / 2]; float32 only.
        self.pairs = as_pairs(self.heads) if self.heads.dtype == torch.float32 else None
        self.attended = buffers.attended[:count].view(count, -1)  # [tokens, heads * d]
        self.attended_op = op(self.attended)
        self.gate_up = buffers.gate_up[:count]  # [tokens, 2 * mlp]
        self.gate_up_op = op(self.gate_up)
        self.gate, self.up = self.gate_up[:, : arch.mlp_size], self.gate_up[:, arch.mlp_size :]  # [tokens, mlp] each
        self.gated = buffers.gated[:count]  # [tokens, mlp]
        self.gated_op = op(self.gated)
        self.change = buffers.change[:count]  # [tokens, hidden], added to the residual stream by a block
        self.change_op = op(self.change)
        self.logits = buffers.logits[:count]  # [tokens, vocab]
        self.logits_op = op(self.logits)


class DecodePlan:
    """Views of the memory that one decode step reads and writes, except weights; reused while its shapes are."""

    def __init__(self, buffers: StepBuffers, tiers: Sequence[TierPlan | WideTierPlan], width: int) -> None:
        """Join the plans of tiers, whose rows follow each other, to a step of ``width`` tokens for every row."""
        self.tiers, self.width = tiers, width
        self.views = buffers.views(width * sum(tier.rows for tier in tiers))
        # int64 [tokens * kv_heads]; a step of one token a row advances them.
        self.counters = buffers.counters[: len(self.views.states) * buffers.arch.kv_head_count]
        self.positions = self.counters[:: buffers.arch.kv_head_count]  # int64 [tokens]

    def keep(self, kept: BoolArray) -> None:
        """Let later steps see those tokens of a wide step that are ``kept``, [rows, width]."""
        first = 0
        for tier in self.tiers:
            assert isinstance(tier, WideTierPlan)
            tier.keep(kept[first : (first := first + tier.rows)])


class TierViews:
    """Views of a tier's first rows over its first positions. n = rows * kv_heads, d = head size."""

    def __init__(self, buffers: StepBuffers, share: TierShare) -> None:
        op, (tier, rows, span) = buffers.operand, share
        used = rows * buffers.arch.kv_head_count
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values, mask = tier.keys[:, :used], tier.values[:, :used], tier.mask[:used]
        self.keys = keys.transpose(2, 3).unbind(0)  # per layer [n, width, d], to write by place
        self.values = values.unbind(0)  # per layer [n, width, d]
        self.mask = mask[:, 0]  # [n, width]
        self.span_key_ops = tuple(op(layer) for layer in keys[..., :span].unbind(0))  # per layer [n, d, span]
        self.span_value_ops = tuple(op(layer) for layer in values[:, :, :span].unbind(0))  # per layer [n, span, d]
        self.span_mask = mask[..., :span]  # [n, 1, span]


class TierPlan:
    """Views of one tier in a step. n = rows in use * kv_heads, g = query heads per kv head, d = head size."""

    def __init__(self, buffers: StepBuffers, share: TierShare, start: int) -> None:
        """Plan a tier's share, whose first row is row ``start`` of the step."""
        arch, op, (_, rows, span) = buffers.arch, buffers.operand, share
        heads, group, stop = arch.kv_head_count, arch.heads_per_kv, start + rows
        self.rows, used = rows, rows * heads
        qkv = buffers.qkv[start:stop].view(used, group + 2, arch.head_size)
        self.tier = TierViews(buffers, share)
        # int64 [n] each: row and position that this step writes
        self.place = buffers.rows[:used], buffers.counters[start * heads : stop * heads]
        self.new_key, self.new_value = qkv[:, group], qkv[:, group + 1]  # [n, d] each
        self.query_op = op(qkv[:, :group])  # [n, g, d]
        self.scores, self.shares = buffers.scores(used, group, span)  # [n, g, span] each, and softmax of the scores
        self.scores_op, self.shares_op = op(self.scores), op(self.shares)
        self.attended_op = op(buffers.attended[start:stop].view(used, group, arch.head_size))  # [n, g, d]

    def begin(self, zero: Tensor) -> None:
        """Make the step's tokens visible, by the mask's value ``zero``."""
        self.tier.mask.index_put_(self.place, zero)

    def attend(self, multiply: Multiply, number: int, scale: float) -> None:
        """Write the keys and values of layer ``number`` and attend."""
        tier = self.tier
        tier.keys[number].index_put_(self.place, self.new_key)
        tier.values[number].index_put_(self.place, self.new_value)
        multiply(self.query_op, tier.span_key_ops[number], self.scores_op)
        torch.add(tier.span_mask, self.scores, alpha=scale, out=self.scores)
        torch.softmax(self.scores, -1, out=self.shares)
        multiply(self.shares_op, tier.span_value_ops[number], self.attended_op)


class WideTierPlan:
    """Views of one tier in a step of w tokens a row: the queries of a row are rows of one product over its cache.

    Each token sees the tokens up to its own. The tier's mask is not read, and does not show the step's tokens before
    ``keep``: keys and values of those that are not kept stay behind the others, where later ones overwrite them.
    """

    def __init__(self, buffers: StepBuffers, share: TierShare, start: int, width: int) -> None:
        """Plan a tier's share, whose first row is row ``start`` of the step."""
        arch, op, (_, rows, span) = buffers.arch, buffers.operand, share
        heads, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size
        tokens = slice(start * width, (start + rows) * width)
        self.rows, self.tier = rows, TierViews(buffers, share)
        qkv = buffers.qkv[tokens].view(rows, width, heads, group + 2, size)
        flat = qkv.view(-1, group + 2, size)
        self.new_key, self.new_value = flat[:, group], flat[:, group + 1]  # [rows * w * kv_heads, d] each
        by_row = buffers.rows[: rows * heads].view(rows, 1, heads).expand(rows, width, heads)
        # int64 [rows * w * kv_heads] each: row and position that this step writes
        self.place = by_row.reshape(-1), buffers.counters[tokens.start * heads : tokens.stop * heads]
        self.all_queries = qkv[:, :, :, :group].permute(0, 2, 3, 1, 4)  # [rows, kv_heads, g, w, d]
        self.queries = torch.empty_like(self.all_queries, memory_format=torch.contiguous_format)
        self.queries_op = op(self.queries.view(rows * heads, group * width, size))
        self.scores, self.shares = buffers.scores(rows * heads, group * width, span)
        self.scores_op, self.shares_op = op(self.scores), op(self.shares)
        self.by_token = self.scores.view(rows, heads * group, width, span)
        self.last_seen = self.place[1].view(rows, width, heads)[:, None, :, :1]  # [rows, 1, w, 1]
        self.columns = torch.arange(span, device=qkv.device)
        self.seen = self.scores.new_empty((rows, 1, width, span))  # additive mask of each token
        self.hidden = self.scores.new_tensor(-torch.inf)
        attended = buffers.attended[tokens].view(rows, width, heads, group, size)
        self.attended = attended.permute(0, 2, 3, 1, 4)  # [rows, kv_heads, g, w, d]
        self._heads = heads

    def begin(self, zero: Tensor) -> None:
        torch.where(self.columns > self.last_seen, self.hidden, zero, out=self.seen)

    def attend(self, multiply: Multiply, number: int, scale: float) -> None:
        tier = self.tier
        tier.keys[number].index_put_(self.place, self.new_key)
        tier.values[number].index_put_(self.place, self.new_value)
        self.queries.copy_(self.all_queries)
        multiply(self.queries_op, tier.span_key_ops[number], self.scores_op)
        torch.add(self.seen, self.by_token, alpha=scale, out=self.by_token)
        torch.softmax(self.scores, -1, out=self.shares)
        multiply(self.shares_op, tier.span_value_ops[number], self.queries_op)
        self.attended.copy_(self.queries)

    def keep(self, kept: BoolArray) -> None:
        """Let later steps see the tokens that are ``kept``, [rows, w]."""
        values = np.where(np.repeat(kept.ravel(), self._heads), np.float32(0), np.float32(-np.inf))
        mask = self.tier.mask
        mask.index_put_(self.place, torch.from_numpy(values).to(mask.device, mask.dtype))


def tier_plan(buffers: StepBuffers, share: TierShare, start: int, width: int) -> TierPlan | WideTierPlan:
    """Plan a tier's share of a step of ``width`` tokens for every row, whose first row is row ``start`` of the step."""
    return TierPlan(buffers, share, start) if width == 1 else WideTierPlan(buffers, share, start, width)
