"""Packed tensors of the forward pass, read from a Hugging Face folder of safetensors.

An RMS norm is x / sqrt(sum(x^2) + size * eps) times sqrt(size) times its weight. The forward pass computes the first
factor (``decoder_model.unit_norm``). The other two are multiplied into the next matrices (those of q and k are one
vector); so a tied head is a copy.
"""

import json
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from rollmesh.errors import EngineError, UnsupportedModel
from rollmesh.generator.engines.torch.architecture import Architecture
from rollmesh.generator.engines.torch.kernels import pair_order

_THREADS = 4
"""Layers that are packed at once; torch and the copy from the file release the interpreter's lock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One transformer block; shapes are [in, out]."""

    qkv: Tensor  # [hidden, kv_heads * (heads_per_kv + 2) * head_size], norm folded in
    qkv_bias: Tensor | None
    qk_norm: Tensor | None  # [heads_per_kv + 1, head_size], times sqrt(head_size)
    output: Tensor  # [heads * head_size, hidden]
    output_bias: Tensor | None
    gate_up: Tensor  # [hidden, 2 * mlp], norm folded in
    down: Tensor  # [mlp, hidden]


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """All weights of one policy version, on one device."""

    embedding: Tensor  # [vocab, hidden]
    layers: tuple[Layer, ...]
    head: Tensor  # [hidden, vocab], norm folded in

    def tensors(self) -> Iterator[Tensor]:
        """Yield every tensor once, in a fixed order."""
        yield self.embedding
        for layer in self.layers:
            parts = (layer.qkv, layer.qkv_bias, layer.qk_norm, layer.output, layer.output_bias)
            yield from (t for t in (*parts, layer.gate_up, layer.down) if t is not None)
        yield self.head


def load_weights(folder: Path, arch: Architecture, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read and pack the weights in ``folder``; UnsupportedModel names a missing tensor or a wrong shape."""
    read, hidden = tensor_reader(folder), arch.hidden_size
    with torch.inference_mode(), ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:

        def tensor(name: str, *shape: int) -> Tensor:
            found = read(name)
            if tuple(found.shape) != shape:
                raise UnsupportedModel(f"{folder}: {name} has shape {list(found.shape)}, expected {list(shape)}")
            return found.float()

        def place(packed: Tensor) -> Tensor:
            # A copy: safetensors may return views of a mapped file that is pruned while the policy serves.
            return packed.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)

        @torch.inference_mode()
        def layer(number: int) -> Layer:
            return _pack_layer(arch, f"model.layers.{number}.", tensor, place)

        norm = tensor("model.norm.weight", hidden) * math.sqrt(hidden)
        rows = "model.embed_tokens.weight" if arch.tied_head else "lm_head.weight"
        return Weights(
            embedding=place(tensor("model.embed_tokens.weight", arch.vocab_size, hidden)),
            head=place((tensor(rows, arch.vocab_size, hidden) * norm).t()),
            layers=tuple(pool.map(layer, range(arch.layer_count))),
        )


def _pack_layer(
    arch: Architecture, prefix: str, tensor: Callable[..., Tensor], place: Callable[[Tensor], Tensor]
) -> Layer:
    hidden, size, kv, group = arch.hidden_size, arch.head_size, arch.kv_head_count, arch.heads_per_kv
    order = pair_order(size)

    def joined(kind: str, *width: int) -> Tensor:
        counts = {"q": kv * group, "k": kv, "v": kv}
        rows = (tensor(f"{prefix}self_attn.{n}_proj.{kind}", count * size, *width) for n, count in counts.items())
        return by_kv_head(arch, *rows)

    input_norm = tensor(f"{prefix}input_layernorm.weight", hidden) * math.sqrt(hidden)
    qkv_bias = qk_norm = output_bias = None
    if arch.qkv_bias:
        qkv_bias = place(joined("bias"))
    if arch.qk_norm:
        q_norm = tensor(f"{prefix}self_attn.q_norm.weight", size)[order]
        k_norm = tensor(f"{prefix}self_attn.k_norm.weight", size)[order]
        qk_norm = place(torch.cat((q_norm.expand(group, size), k_norm.expand(1, size))) * math.sqrt(size))
    if arch.output_bias:
        output_bias = place(tensor(f"{prefix}self_attn.o_proj.bias", hidden))
    mlp_norm = tensor(f"{prefix}post_attention_layernorm.weight", hidden) * math.sqrt(hidden)
    gate = tensor(f"{prefix}mlp.gate_proj.weight", arch.mlp_size, hidden)
    up = tensor(f"{prefix}mlp.up_proj.weight", arch.mlp_size, hidden)
    return Layer(
        qkv=place(joined("weight", hidden).mul_(input_norm).t()),
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        output=place(tensor(f"{prefix}self_attn.o_proj.weight", hidden, arch.head_count * size).t()),
        output_bias=output_bias,
        gate_up=place(torch.cat((gate, up)).mul_(mlp_norm).t()),
        down=place(tensor(f"{prefix}mlp.down_proj.weight", hidden, arch.mlp_size).t()),
    )


def by_kv_head(arch: Architecture, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Order the rows of q, k and v per key-value head: its queries, its key, its value, [kv, group + 2, size, ...].

    A row of the projection is then a stack of multi-query heads, and attention needs no case for grouped heads.
    """
    size, kv, order = arch.head_size, arch.kv_head_count, pair_order(arch.head_size)

    def heads(rows: Tensor, count: int) -> Tensor:
        return rows.view(kv, count, size, *rows.shape[1:])

    parts = (heads(queries, arch.heads_per_kv)[:, :, order], heads(keys, 1)[:, :, order], heads(values, 1))
    return torch.cat(parts, dim=1).flatten(0, 2)


def tensor_reader(folder: Path) -> Callable[[str], Tensor]:
    """Return ``read(name) -> Tensor`` over the single or sharded safetensors of a folder."""
    index, shards = folder / "model.safetensors.index.json", None
    if index.exists():
        try:
            shards = dict[str, str](json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise EngineError(f"{index}: not a safetensors index: {error!r}") from error
        if foreign := {s for s in shards.values() if Path(s).name != s}:
            raise EngineError(f"{index}: shard names must be files in the folder: {sorted(foreign)}")
    handles: dict[str, Any] = {}

    def read(name: str) -> Tensor:
        shard = shards.get(name) if shards is not None else "model.safetensors"
        if shard is None:
            raise UnsupportedModel(f"{folder}: {name} is missing from the checkpoint")
        try:
            if shard not in handles:
                handles[shard] = safe_open(str(folder / shard), framework="pt", device="cpu")
            found: Tensor = handles[shard].get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise EngineError(f"{folder / shard}: {name} cannot be read: {error}") from error
        return found

    return read


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedWeights:
    """Weights in host memory that were read, and that one swap puts in use."""

    folder: Path
    policy_version: int
    weights: Weights

    def scorable_on(self, device: torch.device) -> bool:
        """Tell whether ``device`` can compute with the weights before the swap, which copies them to a GPU."""
        return self.weights.embedding.device.type == device.type
