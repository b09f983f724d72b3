"""What one decode step reads and writes: buffers, views of them and of the cache, and plans that join both."""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kernels import Int64Array, Multiply, Operand, as_pairs
from rollmesh.generator.engines.torch.kv_cache import Tier


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
        longest: int,
        score_count: int,
    ) -> None:
        """Allocate buffers of the type and device of ``like`` for plans of at most ``row_count`` tokens.

        Rows of the cache have at most ``longest`` tokens. Plans share one buffer for at most ``score_count`` attention
        scores of each head: tokens of a step * span of a tier.
        """
        self.arch = arch
        self.operand = operand
        self.states, self.normed, self.change = (like.new_empty((row_count, arch.hidden_size)) for _ in range(3))
        qkv, attended = arch.heads_per_kv + 2, arch.heads_per_kv
        self.qkv = like.new_empty((row_count, arch.kv_head_count, qkv, arch.head_size))
        self.attended = like.new_empty((row_count, arch.kv_head_count, attended, arch.head_size))
        self.gate_up = like.new_empty((row_count, 2 * arch.mlp_size))
        self.gated = like.new_empty((row_count, arch.mlp_size))
        self.logits = like.new_empty((row_count, arch.vocab_size))
        self.rows = torch.arange(row_count * arch.kv_head_count, device=like.device)
        self.counters = torch.zeros_like(self.rows)
        """Position of every token and kv head of the current step."""
        self._in_numpy = self.counters.numpy() if like.device.type == "cpu" else None
        self.seen = like.new_empty(row_count * longest)
        """Additive masks of the tokens of the current step: 0 at the tokens up to its own, -inf behind it."""
        self.longest = longest
        self.hidden = torch.cat((like.new_zeros(longest), like.new_full((longest,), -torch.inf)))
        """Windows of it are masks."""
        self._views: dict[int, TokenViews] = {}
        self._scores = like.new_empty((2, score_count * arch.head_count))

    def place(self, positions: Int64Array) -> None:
        """Set the positions of the next step's tokens, [tokens]."""
        by_head = positions.repeat(self.arch.kv_head_count)
        if self._in_numpy is not None:  # a third of the time of a copy by torch
            self._in_numpy[: len(by_head)] = by_head
        else:
            self.counters[: len(by_head)].copy_(torch.from_numpy(by_head))

    def views(self, count: int) -> "TokenViews":
        """Return the views of the first ``count`` rows of the buffers."""
        if count not in self._views:
            self._views[count] = TokenViews(self, count)
        return self._views[count]

    def scores(self, *shape: int) -> Tensor:
        """Return memory for scores and their softmax, [2, ...]."""
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

    def __init__(self, buffers: StepBuffers, tiers: "Sequence[TierPlan]", width: int) -> None:
        """Join the plans of tiers, whose rows follow each other, to a step of ``width`` tokens for every row."""
        self.tiers, self.width = tiers, width
        count = width * sum(tier.rows for tier in tiers)
        self.views = buffers.views(count)
        # int64 [tokens * kv_heads]; a step of one token a row advances them.
        self.counters = buffers.counters[: count * buffers.arch.kv_head_count]
        self.positions = self.counters[:: buffers.arch.kv_head_count]  # int64 [tokens]


class TierPlan:
    """Views of one tier in a step of w tokens a row. n = rows in use * kv_heads, g = query heads per kv head.

    The queries of a row are rows of one product over its cache; each token sees the tokens up to its own. So what lies
    behind the tokens of a row is never read: what a call had there before it, or tokens of a draft that were not kept.
    """

    def __init__(self, buffers: StepBuffers, share: TierShare, start: int, width: int) -> None:
        """Plan a tier's share of a step of ``width`` tokens a row, whose first row is row ``start`` of the step."""
        arch, op, (tier, rows, span) = buffers.arch, buffers.operand, share
        heads, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size
        used, tokens = rows * heads, slice(start * width, (start + rows) * width)
        self.rows = rows
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values = tier.keys[:, :used], tier.values[:, :used]
        self.keys = keys.transpose(2, 3).unbind(0)  # per layer [n, tier's width, d], to write by place
        self.values = values.unbind(0)  # per layer [n, tier's width, d]
        self.key_ops = tuple(op(layer) for layer in keys[..., :span].unbind(0))  # per layer [n, d, span]
        self.value_ops = tuple(op(layer) for layer in values[:, :, :span].unbind(0))  # per layer [n, span, d]
        by_row = buffers.rows[:used].view(rows, 1, heads).expand(rows, width, heads)
        # int64 [n * w] each: row and position that this step writes
        self.place = by_row.reshape(-1), buffers.counters[tokens.start * heads : tokens.stop * heads]
        qkv = buffers.qkv[tokens].view(rows * width * heads, group + 2, size)
        self.new_key, self.new_value = qkv[:, group], qkv[:, group + 1]  # [n * w, d] each
        # [rows, kv_heads, w, g, d] each
        self.queries = qkv[:, :group].view(rows, width, heads, group, size).transpose(1, 2)
        self.attended = buffers.attended[tokens].view(rows, width, heads, group, size).transpose(1, 2)
        # The product needs rows at one stride, as queries of a single token have, and results of a single kv head.
        self.ordered = None if width == 1 else torch.empty(self.queries.shape).to(self.queries)
        self.collected = None if heads == 1 else self.ordered
        queries = qkv[:, :group] if self.ordered is None else self.ordered.view(used, width * group, size)
        attended = self.attended if self.collected is None else self.collected
        self.query_op, self.attended_op = op(queries), op(attended.view(used, width * group, size))  # [n, w * g, d]
        self.scores, self.shares = buffers.scores(used, width * group, span)  # [n, w * g, span] each, and softmax
        self.scores_op, self.shares_op = op(self.scores), op(self.shares)
        self.by_token = self.scores.view(rows, heads, width, group, span)
        longest, first = buffers.longest, tokens.start * buffers.longest
        self._masks = buffers.seen[first : first + rows * width * span].view(-1, span)
        self._seen = self._masks.view(rows, 1, width, 1, span)
        self._windows = buffers.hidden.as_strided((longest, span), (1, 1))  # the last one hides all but the first token
        self._last, self._behind = self.place[1][::heads], longest - 1  # [rows * w], last position seen

    def begin(self) -> None:
        """Find which tokens of the cache each token of the step sees."""
        torch.index_select(self._windows, 0, torch.rsub(self._last, self._behind), out=self._masks)

    def attend(self, multiply: Multiply, number: int, scale: float) -> None:
        """Write the keys and values of layer ``number`` and attend."""
        self.keys[number].index_put_(self.place, self.new_key)
        self.values[number].index_put_(self.place, self.new_value)
        if self.ordered is not None:
            self.ordered.copy_(self.queries)
        multiply(self.query_op, self.key_ops[number], self.scores_op)
        torch.add(self._seen, self.by_token, alpha=scale, out=self.by_token)
        torch.softmax(self.scores, -1, out=self.shares)
        multiply(self.shares_op, self.value_ops[number], self.attended_op)
        if self.collected is not None:
            self.attended.copy_(self.collected)
