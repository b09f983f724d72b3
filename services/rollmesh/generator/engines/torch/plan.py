"""Views of one decode step, made once for a set of rows and reused until the rows change.

Slicing a tensor costs about as much as multiplying two small ones, so a step only does arithmetic: every view that it
reads or writes hangs in the plan, and one in-place addition moves all positions forward.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.cache import KvCache, Tier
from rollmesh.generator.engines.torch.rope import as_pairs

_SPAN = 16
"""Attention spans are rounded up to this many tokens, so that a plan lives for several steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """One tier's share of a step. n = rows in use * kv_heads, g = query heads per kv head, d = head size."""

    place: tuple[Tensor, Tensor]  # int64 [n] each: row and position that this step writes
    keys: tuple[Tensor, ...]  # per layer [n, width, d], to write by place
    values: tuple[Tensor, ...]  # per layer [n, width, d]
    mask: Tensor  # [n, width]
    new_key: Tensor  # [n, d]
    new_value: Tensor  # [n, d]
    query: Tensor  # [n, g, d]
    span_keys: tuple[Tensor, ...]  # per layer [n, d, span]
    span_values: tuple[Tensor, ...]  # per layer [n, span, d]
    span_mask: Tensor  # [n, 1, span]
    attended: Tensor  # [n, g, d]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """Everything that one decode step reads and writes besides weights."""

    step_count: int
    """Steps until a row outgrows its attention span; the plan is void afterwards."""
    tiers: tuple[TierPlan, ...]
    counters: Tensor  # int64 [rows * kv_heads], next position of each: advanced by one a step
    positions: Tensor  # int64 [rows]
    qkv: Tensor  # [rows, kv_heads * (g + 2) * d]
    heads: Tensor  # [rows, kv_heads, g + 1, d], queries and keys
    pairs: Tensor | None  # the same as complex pairs, [rows, kv_heads, g + 1, d / 2]; None where there are none
    attended: Tensor  # [rows, heads * d]


class Planner:
    """Owns the step buffers and cuts plans out of them."""

    def __init__(self, arch: Architecture, slot_count: int, dtype: torch.dtype, device: torch.device) -> None:
        self._arch = arch
        self._device = device
        heads, group, size = arch.kv_head_count, arch.heads_per_kv, arch.head_size
        self._qkv = torch.empty((slot_count, heads, group + 2, size), dtype=dtype, device=device)
        self._attended = torch.empty((slot_count, heads, group, size), dtype=dtype, device=device)
        self._rows = torch.arange(slot_count * heads, device=device)

    def plan(self, cache: KvCache, lengths: npt.NDArray[np.int64]) -> StepPlan:
        """Plan steps for the rows of all tiers in order; ``lengths`` [rows] are their cached tokens."""
        arch, heads = self._arch, self._arch.kv_head_count
        count = len(lengths)
        counters = torch.from_numpy(np.repeat(lengths, heads)).to(self._device)
        parts: list[TierPlan] = []
        steps, start = cache.longest, 0
        for tier in cache.tiers:
            if not tier.slots:
                continue
            stop = start + len(tier.slots)
            longest = int(lengths[start:stop].max())
            span = min(tier.width, (longest // _SPAN + 1) * _SPAN)
            steps = min(steps, span - longest)
            parts.append(self._tier(tier, start, stop, span, counters))
            start = stop
        qkv = self._qkv[:count]
        rotated = qkv[:, :, : arch.heads_per_kv + 1]
        return StepPlan(
            step_count=steps,
            tiers=tuple(parts),
            counters=counters,
            positions=counters[::heads],
            qkv=qkv.view(count, -1),
            heads=rotated,
            pairs=as_pairs(rotated) if rotated.dtype == torch.float32 else None,
            attended=self._attended[:count].view(count, -1),
        )

    def _tier(self, tier: Tier, start: int, stop: int, span: int, counters: Tensor) -> TierPlan:
        arch, heads, group = self._arch, self._arch.kv_head_count, self._arch.heads_per_kv
        used = (stop - start) * heads
        qkv = self._qkv[start:stop].view(used, group + 2, arch.head_size)
        # Layers stay together until the end: one unbind instead of one slice per layer.
        keys, values, mask = tier.keys[:, :used], tier.values[:, :used], tier.mask[:used]
        return TierPlan(
            place=(self._rows[:used], counters[start * heads : stop * heads]),
            keys=keys.transpose(2, 3).unbind(0),
            values=values.unbind(0),
            mask=mask[:, 0],
            new_key=qkv[:, group],
            new_value=qkv[:, group + 1],
            query=qkv[:, :group],
            span_keys=keys[..., :span].unbind(0),
            span_values=values[:, :, :span].unbind(0),
            span_mask=mask[..., :span],
            attended=self._attended[start:stop].view(used, group, arch.head_size),
        )
