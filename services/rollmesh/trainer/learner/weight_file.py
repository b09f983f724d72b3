"""Safetensors file of the weights, digested while it is written.

The library's writer gives no access to the bytes, so the file would be read again for its digest. Layout: the length of
the header (8 bytes, little-endian), the header (JSON, padded to 8 bytes), the tensors one after the other.
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

WEIGHT_FILE = "model.safetensors"
_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.float64: "F64"}
_BLOCK_BYTES = 16 << 20


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
