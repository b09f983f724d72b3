"""Factors of one adapter, packed to fit the packed matrices of the forward pass (see ``weights``)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.checkpoints.describe import ADAPTER_WEIGHTS_FILE
from rollmesh.config.adapter import AdapterConfig
from rollmesh.errors import EngineError
from rollmesh.generator.engines.adapter_folder import PREFIX, AdaptedLayers, adapted_layers
from rollmesh.generator.engines.stored_tensors import read_shapes
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.weights import by_kv_head, tensor_reader

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
        """Yield the block, the packed matrix and its adapted layers, for every matrix with one."""
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
        """Return the rows of a layer's weight."""
        arch = self.arch
        sizes = {
            "self_attn.q_proj": arch.head_count * arch.head_size,
            "self_attn.k_proj": arch.kv_head_count * arch.head_size,
            "self_attn.v_proj": arch.kv_head_count * arch.head_size,
            "mlp.gate_proj": arch.mlp_size,
            "mlp.up_proj": arch.mlp_size,
        }
        return sizes.get(name, arch.hidden_size)
