"""Views of one decode step, made once for a set of rows and reused until the rows change.

Slicing a tensor takes about as long as multiplying two small ones, so a step only does arithmetic. The plan contains
every view that a step reads or writes, and one in-place addition advances all positions. Fields named ``..._op`` are
operands of the run's ``Multiply`` over the memory of the tensor named before them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kv_cache import KvCache, Tier
from rollmesh.generator.engines.torch.multiply import Multiply, Operand
from rollmesh.generator.engines.torch.rope import as_pairs

_SPAN = 16
"""Attention spans are rounded up to a multiple of this, so that a plan is valid for several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Views of one tier in a step. n = rows in use * kv_heads, g = query heads per kv head, d = head size."""

    place: tuple[Tensor, Tensor]  # int64 [n] each: row and position that this step writes
    keys: tuple[Tensor, ...]  # per layer [n, width, d], to write by place
    values: tuple[Tensor, ...]  # per layer [n, width, d]
    mask: Tensor  # [n, width]
    new_key: Tensor  # [n, d]
    new_value: Tensor  # [n, d]
    query_op: Operand  # [n, g, d]
    span_key_ops: tuple[Operand, ...]  # per layer [n, d, span]
    span_value_ops: tuple[Operand, ...]  # per layer [n, span, d]
    span_mask: Tensor  # [n, 1, span]
    scores: Tensor  # [n, g, span]
    scores_op: Operand
    shares: Tensor  # [n, g, span], softmax of the scores
    shares_op: Operand
    attended_op: Operand  # [n, g, d]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Memory that one decode step reads and writes, except weights."""

    step_count: int
    """Steps until a row outgrows its attention span; the plan is invalid afterwards."""
    tiers: tuple[TierPlan, ...]
    counters: Tensor  # int64 [rows * kv_heads], next position of each: advanced by one a step
    positions: Tensor  # int64 [rows]
    states: Tensor  # [rows, hidden], the residual stream
    normed: Tensor  # [rows, hidden]
    normed_op: Operand
    qkv: Tensor  # [rows, kv_heads * (g + 2) * d]
    qkv_op: Operand
    heads: Tensor  # [rows, kv_heads, g + 1, d], queries and keys
    pairs: Tensor | None  # the same as complex pairs, [rows, kv_heads, g + 1, d / 2]; float32 only
    attended: Tensor  # [rows, heads * d]
    attended_op: Operand
    gate_up: Tensor  # [rows, 2 * mlp]
    gate_up_op: Operand
    gate: Tensor  # [rows, mlp]
    up: Tensor  # [rows, mlp]
    gated: Tensor  # [rows, mlp]
    gated_op: Operand
    change: Tensor  # [rows, hidden], added to the residual stream by a block
    change_op: Operand
    logits: Tensor  # [rows, vocab]
    logits_op: Operand


@dataclass(frozen=True, slots=True, kw_only=True)
class TierShare:
    """Part of one tier in a plan: its first rows, over the first ``span`` tokens."""

    tier: Tier
    rows: int
    span: int


class Planner:
    """Owner of the step buffers; builds plans over them."""

    def __init__(
        self,
        arch: Architecture,
        slot_count: int,
        multiply: Multiply,
        like: Tensor,
        *,
        shared_score_tokens: int = 0,
    ) -> None:
        """Allocate buffers of the type and device of ``like`` for plans of at most ``slot_count`` rows.

        All plans share one buffer for attention scores of at most ``shared_score_tokens`` (rows * span of a tier); 0
        gives each plan its own buffer.
        """
        self._arch = arch
        self._multiply = multiply
        self._scratch: Tensor | None = None
        if shared_score_tokens:
            self._scratch = like.new_empty((2, shared_score_tokens * arch.head_count))
        heads, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size

        def buffer(*shape: int) -> Tensor:
            return like.new_empty((slot_count, *shape))

        self._states = buffer(arch.hidden_size)
        self._normed = buffer(arch.hidden_size)
        self._change = buffer(arch.hidden_size)
        self._qkv = buffer(heads, group + 2, size)
        self._attended = buffer(heads, group, size)
        self._gate_up = buffer(2 * arch.mlp_size)
        self._gated = buffer(arch.mlp_size)
        self._logits = buffer(arch.vocab_size)
        self._rows = torch.arange(slot_count * heads, device=like.device)

    def plan(self, cache: KvCache, lengths: npt.NDArray[np.int64]) -> StepPlan:
        """Build the plan for the active rows of all tiers; ``lengths`` [rows] are the cached tokens of all rows."""
        shares: list[TierShare] = []
        active: list[npt.NDArray[np.int64]] = []
        steps, start = cache.longest, 0
        for tier in cache.tiers:
            here = lengths[start : start + tier.active_count]
            start += len(tier.slots)
            if not len(here):
                continue
            longest = int(here.max())
            span = min(tier.width, (longest // _SPAN + 1) * _SPAN)
            steps = min(steps, span - longest)
            shares.append(TierShare(tier=tier, rows=len(here), span=span))
            active.append(here)
        return self.build(shares, self.counters(np.concatenate(active)), steps)

    def counters(self, lengths: npt.NDArray[np.int64]) -> Tensor:
        """Return the next position of every row and kv head, int64 [rows * kv_heads]."""
        return torch.from_numpy(np.repeat(lengths, self._arch.kv_head_count)).to(self._rows.device)

    def build(self, shares: Iterable[TierShare], counters: Tensor, step_count: int) -> StepPlan:
        """Build the plan for these shares of the tiers; a step advances ``counters`` [rows * kv_heads]."""
        arch, op, heads = self._arch, self._multiply.operand, self._arch.kv_head_count
        parts: list[TierPlan] = []
        count = 0
        for share in shares:
            parts.append(self._tier(share, count, counters))
            count += share.rows
        qkv, gate_up, gated = self._qkv[:count], self._gate_up[:count], self._gated[:count]
        normed, change, logits = self._normed[:count], self._change[:count], self._logits[:count]
        attended = self._attended[:count].view(count, -1)
        flat, rotated = qkv.view(count, -1), qkv[:, :, : arch.heads_per_kv + 1]
        return StepPlan(
            step_count=step_count,
            tiers=tuple(parts),
            counters=counters,
            positions=counters[::heads],
            states=self._states[:count],
            normed=normed,
            normed_op=op(normed),
            qkv=flat,
            qkv_op=op(flat),
            heads=rotated,
            pairs=as_pairs(rotated) if rotated.dtype == torch.float32 else None,
            attended=attended,
            attended_op=op(attended),
            gate_up=gate_up,
            gate_up_op=op(gate_up),
            gate=gate_up[:, : arch.mlp_size],
            up=gate_up[:, arch.mlp_size :],
            gated=gated,
            gated_op=op(gated),
            change=change,
            change_op=op(change),
            logits=logits,
            logits_op=op(logits),
        )

    def _tier(self, share: TierShare, start: int, counters: Tensor) -> TierPlan:
        arch, op, group = self._arch, self._multiply.operand, self._arch.heads_per_kv
        heads, tier, span = arch.kv_head_count, share.tier, share.span
        stop = start + share.rows
        used = share.rows * heads
        qkv = self._qkv[start:stop].view(used, group + 2, arch.head_size)
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values, mask = tier.keys[:, :used], tier.values[:, :used], tier.mask[:used]
        scores, shares = self._score_buffers(used, group, span)
        return TierPlan(
            place=(self._rows[:used], counters[start * heads : stop * heads]),
            keys=keys.transpose(2, 3).unbind(0),
            values=values.unbind(0),
            mask=mask[:, 0],
            new_key=qkv[:, group],
            new_value=qkv[:, group + 1],
            query_op=op(qkv[:, :group]),
            span_key_ops=tuple(op(layer) for layer in keys[..., :span].unbind(0)),
            span_value_ops=tuple(op(layer) for layer in values[:, :, :span].unbind(0)),
            span_mask=mask[..., :span],
            scores=scores,
            scores_op=op(scores),
            shares=shares,
            shares_op=op(shares),
            attended_op=op(self._attended[start:stop].view(used, group, arch.head_size)),
        )

    def _score_buffers(self, *shape: int) -> Tensor:
        if self._scratch is None:
            return self._qkv.new_empty((2, *shape))
        return self._scratch[:, : math.prod(shape)].view(2, *shape)
