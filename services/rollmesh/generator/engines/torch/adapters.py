"""Factors of the loaded adapters side by side, so that one product serves rows of several versions.

The columns of A of all versions form one matrix, and so do the rows of B. All rows are multiplied by the versions that
any of them uses, and the columns of those that a row does not use are set to 0 between the two products. A static step
multiplies by all places: its shapes and addresses are constant while the number of places is, so a captured graph
computes with the adapters that are loaded when it is replayed.
"""

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.checkpoints.describe import ADAPTER_WEIGHTS_FILE
from rollmesh.config.model import AdapterConfig
from rollmesh.errors import EngineError
from rollmesh.generator.engines.policy_folders import PREFIX, AdaptedLayers, adapted_layers, read_shapes
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kernels import Int64Array
from rollmesh.generator.engines.torch.weights import by_kv_head, tensor_reader

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

    def put(self, version: int, factors: "Factors") -> None:
        """Load an adapter; there must be a free place."""
        free = set(range(self._unused.shape[1])) - set(self._versions.values())
        place = self._versions.setdefault(version, min(free, default=BASE))
        for key, (a, b) in factors.items():
            ranks, (all_a, all_b) = len(b), self._factors[key]
            at = slice(place * ranks, (place + 1) * ranks)
            all_a[:, at].copy_(a, non_blocking=True)
            all_b[at].copy_(b, non_blocking=True)

    def drop(self, version: int) -> None:
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


MATRICES: Mapping[str, tuple[str, ...]] = {
    "qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "output": ("self_attn.o_proj",),
    "gate_up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""Layers of a block that each packed matrix joins."""

Factors = dict[tuple[int, str], tuple[Tensor, Tensor]]
"""A [in, ranks] and B [ranks, out] of every adapted matrix, by block and matrix; a matrix of n adapted layers has n
times the rank. B contains the adapter's scale."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterReader:
    """Reader of the adapters above one base."""

    arch: Architecture
    layers: AdaptedLayers
    norms: tuple[tuple[Tensor, Tensor], ...]
    """Weights of the norms before the attention and before the MLP, times sqrt(hidden), by block."""
    dtype: torch.dtype

    @classmethod
    def of_base(cls, folder: Path, arch: Architecture, config: AdapterConfig, dtype: torch.dtype) -> Self:
        """Read what adapters need of the base in ``folder``; ConfigError if it lacks a target."""
        read, root = tensor_reader(folder), math.sqrt(arch.hidden_size)

        def norm(block: int, name: str) -> Tensor:
            return read(f"model.layers.{block}.{name}.weight").float() * root

        norms = [(norm(i, "input_layernorm"), norm(i, "post_attention_layernorm")) for i in range(arch.layer_count)]
        layers = adapted_layers(read_shapes(folder), config)
        return cls(arch=arch, layers=layers, norms=tuple(norms), dtype=dtype)

    def shapes(self) -> dict[tuple[int, str], tuple[int, int, int]]:
        """Return [in, ranks, out] of every adapted matrix, by block and matrix."""
        sizes, layers = {}, self.layers.layers
        for block, matrix, chosen in self._adapted():
            columns = layers[f"model.layers.{block}.{chosen[0]}"][1]
            rows = sum(self._rows(name) for name in MATRICES[matrix])
            sizes[block, matrix] = columns, len(chosen) * self.layers.config.rank, rows
        return sizes

    def read(self, folder: Path) -> Factors:
        """Read and pack a folder in host memory; EngineError if it is no adapter of this run and base."""
        self.layers.check(folder)
        file = folder / ADAPTER_WEIGHTS_FILE
        try:
            with torch.inference_mode(), safe_open(str(file), framework="pt", device="cpu") as tensors:
                return {
                    (block, matrix): self._pack(file, tensors, block, matrix, chosen)
                    for block, matrix, chosen in self._adapted()
                }
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{file} cannot be read: {error}") from error

    def _adapted(self) -> Iterator[tuple[int, str, list[str]]]:
        for block in range(self.arch.layer_count):
            for matrix, names in MATRICES.items():
                chosen = [name for name in names if f"model.layers.{block}.{name}" in self.layers.layers]
                if chosen:
                    yield block, matrix, chosen

    def _pack(self, file: Path, tensors: Any, block: int, matrix: str, chosen: list[str]) -> tuple[Tensor, Tensor]:
        config = self.layers.config

        def factor(name: str, which: str) -> Tensor:
            stored = f"{PREFIX}model.layers.{block}.{name}.lora_{which}.weight"
            found: Tensor = tensors.get_tensor(stored).float()
            if not torch.isfinite(found).all():  # rows of other versions would become NaN, too
                raise EngineError(f"{file}: {stored} has values that are not finite")
            return found

        a = torch.cat([factor(name, "A") for name in chosen])
        if matrix in ("qkv", "gate_up"):
            a = a * self.norms[block][matrix == "gate_up"]
        wide: list[Tensor] = []
        for name in MATRICES[matrix]:
            rows = self._rows(name)
            b = torch.zeros(rows, len(a))
            if name in chosen:
                start = chosen.index(name) * config.rank
                b[:, start : start + config.rank] = factor(name, "B") * (config.alpha / config.rank)
            wide.append(b)
        joined = by_kv_head(self.arch, *wide) if matrix == "qkv" else torch.cat(wide)
        return a.t().to(self.dtype), joined.t().to(self.dtype)

    def _rows(self, name: str) -> int:
        arch = self.arch
        sizes = {
            "self_attn.q_proj": arch.head_count * arch.head_size,
            "self_attn.k_proj": arch.kv_head_count * arch.head_size,
            "self_attn.v_proj": arch.kv_head_count * arch.head_size,
            "mlp.gate_proj": arch.mlp_size,
            "mlp.up_proj": arch.mlp_size,
        }
        return sizes.get(name, arch.hidden_size)
