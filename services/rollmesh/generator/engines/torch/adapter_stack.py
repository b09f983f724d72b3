"""Factors of the loaded adapters side by side, so that one product serves rows of several versions.

The columns of A of all versions form one matrix, and so do the rows of B. All rows are multiplied by the versions that
any of them uses, and the columns of those that a row does not use are set to 0 between the two products. A static step
multiplies by all places: its shapes and addresses are constant while the number of places is, so a captured graph
computes with the adapters that are loaded when it is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rollmesh.errors import EngineError
from rollmesh.generator.engines.torch.adapter_weights import Factors
from rollmesh.generator.engines.torch.sampled_tokens import Int64Array

BASE = -1
"""Place of rows without an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterRows:
    """Adapters of the rows of one forward pass."""

    unused: Tensor
    """True at the places that a row does not use, bool [rows, places]."""
    used: tuple[int, ...] | None
    """Places that any row uses; None multiplies by all places."""
    is_mixed: bool
    """True unless all rows use the same place."""


class AdapterStack:
    """Adapters of one base by version; the model thread owns it."""

    def __init__(
        self,
        shapes: Mapping[tuple[int, str], tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        base_version: int,
        rows: int,
        static: bool = False,
    ) -> None:
        """Create a stack without places, for matrices of ``shapes`` and for decode steps of at most ``rows`` rows.

        ``base_version`` is the version without an adapter. ``static`` decode steps have constant shapes.
        """
        self._shapes = shapes
        self._base_version = base_version
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._factors: Factors = {key: (self._like, self._like) for key in shapes}
        self._versions: dict[int, int] = {}
        self._unused = torch.ones(rows, 0, dtype=torch.bool, device=device)
        self._static = static
        self._arranged = AdapterRows(unused=self._unused, used=None, is_mixed=True)

    @property
    def versions(self) -> Collection[int]:
        """Versions that are loaded."""
        return self._versions.keys()

    @property
    def place_count(self) -> int:
        """Adapters for which memory is reserved."""
        return self._unused.shape[1]

    def place_of(self, version: int) -> int:
        """Return the place of a version, BASE for the base; EngineError if it is not loaded."""
        if version == self._base_version:
            return BASE
        if version not in self._versions:
            raise EngineError(f"policy version {version} is not loaded; loaded are {sorted(self._versions)}")
        return self._versions[version]

    def put(self, version: int, factors: Factors) -> None:
        """Load an adapter; there must be a free place."""
        free = set(range(self._unused.shape[1])) - set(self._versions.values())
        place = self._versions.setdefault(version, min(free, default=BASE))
        for key, (a, b) in factors.items():
            ranks, (all_a, all_b) = len(b), self._factors[key]
            at = slice(place * ranks, (place + 1) * ranks)
            all_a[:, at].copy_(a, non_blocking=True)
            all_b[at].copy_(b, non_blocking=True)

    def drop(self, version: int) -> None:
        """Free the place of a version that no row uses."""
        del self._versions[version]

    def reserve(self, places: int) -> None:
        """Reserve memory for so many adapters; those that are loaded stay, captured graphs become invalid."""
        before = self._unused.shape[1]
        for key, (columns, ranks, rows) in self._shapes.items():
            a, b = self._like.new_zeros(columns, places * ranks), self._like.new_zeros(places * ranks, rows)
            if before:
                a[:, : before * ranks], b[: before * ranks] = self._factors[key]
            self._factors[key] = a, b
        self._unused = self._unused.new_ones(len(self._unused), places)

    def select(self, places: Int64Array) -> AdapterRows:
        """Return the adapters of rows in these places, [rows]."""
        unused = torch.from_numpy(np.arange(self.place_count) != places[:, None]).to(self._unused.device)
        found = np.unique(places)
        used = tuple(int(place) for place in found if place != BASE)
        return AdapterRows(unused=unused, used=used, is_mixed=len(found) > 1)

    def arrange(self, places: Int64Array) -> None:
        """Set the places of the rows of the next decode steps, [rows]."""
        self._arranged = self.select(places)
        if self._static:
            self._unused[: len(places)].copy_(self._arranged.unused)

    def rows_in_order(self, count: int) -> AdapterRows:
        """Return the adapters of ``count`` rows as arranged; those of a static step are at an address that stays."""
        if not self._static:
            return self._arranged
        return AdapterRows(unused=self._unused[:count], used=None, is_mixed=True)

    def add_(self, out: Tensor, block: int, matrix: str, x: Tensor, rows: AdapterRows) -> None:
        """Add the adapters' share of a product: x [rows, in] to out [rows, out]."""
        if (block, matrix) not in self._factors:
            return
        a, b = self._factors[block, matrix]
        if rows.used is None:
            inner = torch.mm(x, a).view(len(x), self.place_count, -1)
            out.addmm_(inner.masked_fill_(rows.unused.unsqueeze(2), 0.0).view(len(x), -1), b)
            return
        ranks = len(b) // self.place_count
        for place in rows.used:
            at = slice(place * ranks, (place + 1) * ranks)
            inner = torch.mm(x, a[:, at])
            if rows.is_mixed:
                # Masked, not multiplied: 0 times the overflow of another version's product is NaN.
                inner.masked_fill_(rows.unused[:, place : place + 1], 0.0)
            out.addmm_(inner, b[at])
