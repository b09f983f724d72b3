"""Key-value cache in length tiers.

A tier is a dense block of rows of one width. A call starts in the narrowest tier that holds its context and moves to
the next tier when it outgrows the row. So the attention of a short call does not span the length of the longest call,
and the rows of a tier are one strided view without gathering. Rows stay dense: the last row fills a hole.

Blocks grow on demand and release unused rows, so the allocated tokens never exceed the capacity. While calls move, one
block or the moved rows exist twice. What the blocks leave of the capacity holds the prefixes of calls that have ended.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kept_prefixes import Prefix, Prefixes
from rollmesh.types import Int32Array

PlanKey = tuple[tuple[int, int, int], ...]
"""Number, rows and span of each tier in a step, and the step's tokens a row as (-1, tokens, 0)."""


def tier_widths(longest: int, *, first: int) -> tuple[int, ...]:
    """Return ascending tier widths up to exactly ``longest`` tokens: doublings of ``first``.

    Wide tiers waste memory, and attend as far as their longest row; each tier in use costs some operations per layer,
    and on a GPU each combination of tiers in use needs its own graph. So the last width may be 1.25 times a doubling.
    """
    widths = []
    while first < longest / 1.25:
        widths.append(first)
        first *= 2
    return (*widths, longest)


class Tier:
    """Rows of one width; ``slots[i]`` is the call in row i."""

    def __init__(self, arch: Architecture, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.width = width
        self.slots: list[int] = []
        self.held_count = 0
        """Rows at the end that steps skip; see ``KvCache.hold``."""
        self.row_capacity = 0
        self._heads = arch.kv_head_count
        self.keys = torch.empty((arch.layer_count, 0, arch.head_size, width), dtype=dtype, device=device)
        """Transposed keys [layers, rows * kv_heads, head_size, width]: a third cheaper to multiply by few queries."""
        self.values = torch.empty((arch.layer_count, 0, width, arch.head_size), dtype=dtype, device=device)
        """Values [layers, rows * kv_heads, width, head_size]."""

    @property
    def active_count(self) -> int:
        """Leading rows that a step computes."""
        return len(self.slots) - self.held_count

    def resize(self, row_capacity: int) -> None:
        """Reallocate the block for ``row_capacity`` rows and keep the rows in use."""
        kept, total = len(self.slots) * self._heads, row_capacity * self._heads
        # Entries beyond a call's tokens are multiplied by a softmax weight of 0, so they must be finite: zeros.
        keys = self.keys.new_zeros((self.keys.shape[0], total, *self.keys.shape[2:]))
        values = self.values.new_zeros((self.values.shape[0], total, *self.values.shape[2:]))
        keys[:, :kept] = self.keys[:, :kept]
        values[:, :kept] = self.values[:, :kept]
        self.keys, self.values, self.row_capacity = keys, values, row_capacity

    def rows(self, start: int, stop: int) -> slice:
        """Return the slice of these rows in ``keys`` and ``values`` (dimension 1)."""
        return slice(start * self._heads, stop * self._heads)

    def row(self, index: int) -> tuple[Tensor, Tensor]:
        rows = self.rows(index, index + 1)
        return self.keys[:, rows], self.values[:, rows]

    def remove(self, index: int) -> None:
        """Remove a row; the last row takes its place."""
        last = len(self.slots) - 1
        if index != last:
            for hole, tail in zip(self.row(index), self.row(last), strict=True):
                hole.copy_(tail)
            self.slots[index] = self.slots[last]
        self.slots.pop()


class KvCache:
    """Keys and values of every slot, in tiers."""

    def __init__(
        self,
        arch: Architecture,
        *,
        token_capacity: int,
        widths: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        several_turns: bool = True,
    ) -> None:
        self.token_capacity = token_capacity
        self.several_turns = several_turns
        """Whether calls continue ended ones. Otherwise none is kept: its copy costs a tenth of the calls a second."""
        self.longest = widths[-1]
        """Longest context that one row can hold."""
        self.tiers = [Tier(arch, width, dtype, device) for width in widths]
        self.views: OrderedDict[PlanKey, Any] = OrderedDict()
        """Objects that address the memory of tiers; dropped before the block of one of their tiers is reallocated."""
        self.prefixes = Prefixes()
        self._place: dict[int, tuple[Tier, int]] = {}

    @property
    def reserved(self) -> int:
        """Cache tokens taken by the rows in use: the sum of their tiers' widths."""
        return sum(len(tier.slots) * tier.width for tier in self.tiers)

    @property
    def allocated(self) -> int:
        """Cache tokens taken by the blocks; with the kept prefixes never more than the capacity."""
        return sum(tier.row_capacity * tier.width for tier in self.tiers)

    def width_for(self, length: int) -> int:
        return self._tier_for(length).width

    def has_room(self, widths: Iterable[int]) -> bool:
        return self.reserved + sum(widths) <= self.token_capacity

    def write(self, slot: int, keys: Tensor, values: Tensor, start: int = 0) -> None:
        """Write n positions of a slot: keys [layers, kv_heads, d, n], values [layers, kv_heads, n, d]."""
        into_keys, into_values = self.read(slot, start + values.shape[2])
        into_keys[..., start:].copy_(keys)
        into_values[:, :, start:].copy_(values)

    def read(self, slot: int, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the first ``count`` positions of a slot, in the shapes of ``write``."""
        tier, index = self._place[slot]
        keys, values = tier.row(index)
        return keys[..., :count], values[:, :, :count]

    def read_prefix(self, prefix: Prefix, count: int) -> tuple[Tensor, Tensor]:
        """Return views of the first ``count`` positions of a prefix, in the shapes of ``write``."""
        if prefix.kept is None:
            return self.read(prefix.slot, count)
        keys, values = prefix.kept
        return keys[..., :count], values[:, :, :count]

    def keep(self, slot: int, policy_version: int, ids: Int32Array) -> None:
        """Keep the positions of ``ids`` of a slot if the blocks leave room, instead of the prefix that they continue.

        Blocks of which half is unused shrink before an older prefix is evicted.
        """
        if not self.several_turns:
            return
        for tier in self.tiers:
            lacking = self.allocated + self.prefixes.kept_tokens + len(ids) > self.token_capacity
            if lacking and tier.row_capacity >= 2 * max(1, len(tier.slots)):
                self._resize(tier, len(tier.slots) + len(tier.slots) // 4)
        before, common = self.prefixes.longest(policy_version, ids)
        if before is not None and before.kept is not None and common == len(before.token_ids):
            self.prefixes.remove(before)
        room = self.token_capacity - self.allocated
        if len(ids) <= room:
            self.prefixes.evict(room - len(ids))
            keys, values = self.read(slot, len(ids))
            kept = keys.clone(), values.clone()
            self.prefixes.add(Prefix(policy_version=policy_version, token_ids=ids, kept=kept))

    def add(self, slot: int, length: int) -> None:
        """Give ``slot`` a row for ``length`` tokens, to be written next; the caller has checked ``has_room``."""
        tier = self._tier_for(length)
        index = len(tier.slots)
        self._reserve(tier, index + 1)
        tier.slots.append(slot)
        self._place[slot] = (tier, index)

    def remove(self, slot: int) -> None:
        tier, index = self._place.pop(slot)
        tier.remove(index)
        if index < len(tier.slots):
            self._place[tier.slots[index]] = (tier, index)

    def hold(self, slots: Collection[int]) -> None:
        """Move the rows of these slots to the end of their tier; ``held_count`` is valid until rows change."""
        for tier in self.tiers:
            tier.held_count = sum(slot in slots for slot in tier.slots)
            front = tier.active_count
            held = [i for i in range(front) if tier.slots[i] in slots]
            active = [i for i in range(front, len(tier.slots)) if tier.slots[i] not in slots]
            for one, other in zip(held, active, strict=True):
                for here, there in zip(tier.row(one), tier.row(other), strict=True):
                    kept = here.clone()
                    here.copy_(there)
                    there.copy_(kept)
                tier.slots[one], tier.slots[other] = tier.slots[other], tier.slots[one]
                self._place.update({tier.slots[i]: (tier, i) for i in (one, other)})

    def next_width(self, slot: int) -> int:
        tier, _ = self._place[slot]
        return self.tiers[self.tiers.index(tier) + 1].width

    def promote(self, source: Tier, slots: Sequence[int]) -> None:
        """Move slots of one tier to the next wider tier; the caller has made room for the difference."""
        target = self.tiers[self.tiers.index(source) + 1]
        start, stop = len(target.slots), len(target.slots) + len(slots)
        self._reserve(target, stop, vacated=len(slots) * source.width)
        into = target.rows(start, stop)
        all_rows = len(slots) == len(source.slots)
        moved = list(source.slots) if all_rows else list(slots)
        index: slice | Tensor = source.rows(0, stop - start)
        if not all_rows:
            heads = range(source.rows(0, 1).stop)
            rows = [self._place[s][1] * len(heads) + h for s in moved for h in heads]
            index = torch.tensor(rows, device=source.keys.device)
        target.keys[:, into, :, : source.width] = source.keys[:, index]
        target.values[:, into, : source.width] = source.values[:, index]
        for slot in moved:
            self.remove(slot) if not all_rows else self._place.pop(slot)
        if all_rows:
            source.slots.clear()
        target.slots.extend(moved)
        self._place.update({slot: (target, start + i) for i, slot in enumerate(moved)})
        if self.allocated > self.token_capacity:
            self._resize(source, len(source.slots))

    def _tier_for(self, length: int) -> Tier:
        return next((t for t in self.tiers if t.width > length), self.tiers[-1])

    def _reserve(self, tier: Tier, rows: int, vacated: int = 0) -> None:
        """Grow the block of ``tier``; take unused rows of other tiers and kept prefixes if the capacity requires it."""
        if rows <= tier.row_capacity:
            return
        others = [t for t in self.tiers if t is not tier]

        def free() -> int:
            return self.token_capacity + vacated - sum(t.row_capacity * t.width for t in others)

        if rows * tier.width > free():
            for other in others:
                if other.row_capacity > len(other.slots):
                    self._resize(other, len(other.slots))
        # Rows to spare, so that a block does not move for every row, evict few prefixes.
        wanted = min(max(2 * tier.row_capacity, 4), (free() - self.prefixes.kept_tokens) // tier.width)
        wanted = max(rows, wanted, min(rows + rows // 8, free() // tier.width))
        self.prefixes.evict(free() - wanted * tier.width)
        self._resize(tier, wanted)

    def _resize(self, tier: Tier, row_capacity: int) -> None:
        number = self.tiers.index(tier)
        for key in [key for key in self.views if any(number == part[0] for part in key)]:
            del self.views[key]
        tier.resize(row_capacity)
