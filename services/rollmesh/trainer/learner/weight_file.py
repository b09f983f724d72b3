"""Safetensors files of the weights, digested while they are written: one file, or shards in parallel threads.

The library's writer gives no access to the bytes, so a file would be read again for its digest. Layout: the length of
the header (8 bytes, little-endian), the header (JSON, padded to 8 bytes), the tensors one after the other. Shards and
their index are named as ``save_pretrained`` names them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rollmesh.checkpoints.durable import sync_file

WEIGHT_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_BLOCK_BYTES = 1 << 20
"""Bytes per write. For larger ones the kernel searches larger pieces of free memory: up to seconds per GiB."""
_SHARD_BYTES = 256 << 20
"""Smallest limit of a shard; models up to this size are one file."""
_MOST_SHARDS = 32
_THREADS = 4
"""Shards that are written at once."""


def write_weights(folder: Path, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Write contiguous CPU tensors to one file, or to shards with an index; return the sha256 (hex) of each by path."""
    shards = list(_shards(tensors))
    if len(shards) == 1:
        return {WEIGHT_FILE: write_weight_file(folder / WEIGHT_FILE, tensors)}
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="weights") as pool:
        digests = list(pool.map(lambda name, shard: _write_shard(folder / name, shard), names, shards))
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in shard},
    }
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    return dict(zip(names, digests, strict=True))


def _shards(tensors: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Divide the tensors in their order; only a tensor that alone is larger than the limit makes a larger shard."""
    limit = max(_SHARD_BYTES, sum(tensor.nbytes for tensor in tensors.values()) // _MOST_SHARDS)
    shard: dict[str, Tensor] = {}
    size = 0
    for name, tensor in tensors.items():
        if shard and size + tensor.nbytes > limit:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _write_shard(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write one shard and flush it to the device, while other shards are written; return its sha256."""
    digest = write_weight_file(path, tensors)
    sync_file(path)
    return digest


def write_weight_file(path: Path, tensors: Mapping[str, Tensor]) -> str:
    """Write contiguous CPU tensors to a safetensors file; return its sha256 (hex)."""
    digest = hashlib.sha256()
    with path.open("wb") as file, ThreadPoolExecutor(1, thread_name_prefix="digest") as pool:
        for block in _blocks(tensors):
            hashed = pool.submit(digest.update, block)
            file.write(block)
            hashed.result()
    return digest.hexdigest()


def _blocks(tensors: Mapping[str, Tensor]) -> Iterator[memoryview | bytes]:
    """Yield the content of the file; tensors are not copied."""
    yield _header(tensors)
    for tensor in tensors.values():
        data = tensor.view(-1).view(torch.uint8).numpy().data
        for start in range(0, len(data), _BLOCK_BYTES):
            yield data[start : start + _BLOCK_BYTES]


def _header(tensors: Mapping[str, Tensor]) -> bytes:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in tensors.items():
        end = start + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header
