"""Factors of the loaded adapters side by side, so that one product serves rows of several versions.

The columns of A of all versions form one matrix, and so do the rows of B. A row is multiplied by all of them, and the
columns of the versions that it does not use are set to 0 between the two products. Shapes and addresses are constant
while the number of places is, so a captured graph computes with the adapters that are loaded when it is replayed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import torch
from torch import Tensor

from rollmesh.generator.engines.torch.adapter_weights import Factors
from rollmesh.generator.engines.torch.sampled_tokens import Int64Array

BASE = -1
"""Place of rows without an adapter."""


class AdapterStack:
    """Adapters of one base by version; the model thread owns it."""

    def __init__(
        self,
        shapes: Mapping[tuple[int, str], tuple[int, int, int]],
        dtype: torch.dtype,
        device: torch.device,
        *,
        rows: int,
    ) -> None:
        """Create a stack without places, for matrices of ``shapes`` and for decode steps of at most ``rows`` rows."""
        self._shapes = shapes
        self._like = torch.empty(0, dtype=dtype, device=device)
        self._factors: Factors = {key: (self._like, self._like) for key in shapes}
        self._versions: dict[int, int] = {}
        self._unused = torch.ones(rows, 0, dtype=torch.bool, device=device)

    @property
    def versions(self) -> Collection[int]:
        """Versions that are loaded."""
        return self._versions.keys()

    @property
    def place_count(self) -> int:
        """Adapters for which memory is reserved."""
        return self._unused.shape[1]

    def place_of(self, version: int) -> int:
        """Return the place of a version; BASE for one without an adapter."""
        return self._versions.get(version, BASE)

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

    def select(self, places: Int64Array) -> Tensor:
        """Return a mask of the places that these rows do not use, bool [rows, places]."""
        return torch.from_numpy(np.arange(self.place_count) != places[:, None]).to(self._unused.device)

    def arrange(self, places: Int64Array) -> None:
        """Set the places of the rows of the next decode steps, [rows]."""
        self._unused[: len(places)].copy_(self.select(places))

    def rows_in_order(self, count: int) -> Tensor:
        """Return the mask of the first ``count`` rows as arranged, at an address that stays."""
        return self._unused[:count]

    def add_(self, out: Tensor, block: int, matrix: str, x: Tensor, unused: Tensor) -> None:
        """Add the adapters' share of a product: x [rows, in] to out [rows, out]."""
        factors = self._factors.get((block, matrix))
        if factors is None:
            return
        a, b = factors
        inner = torch.mm(x, a).view(len(x), unused.shape[1], -1)
        # Masked, not multiplied: 0 times the overflow of another version's product is NaN.
        out.addmm_(inner.masked_fill_(unused.unsqueeze(2), 0.0).view(len(x), -1), b)
