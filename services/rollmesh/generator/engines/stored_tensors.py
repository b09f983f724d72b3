"""JSON objects and safetensors headers of a policy folder, read without torch."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from rollmesh.errors import EngineError, UnsupportedModel

_LONGEST_HEADER_BYTES = 100_000_000


def read_object(file: Path) -> dict[str, Any]:
    """Read a JSON object; EngineError if the file cannot be read, UnsupportedModel if it is no object."""
    try:
        data = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise EngineError(f"{file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise UnsupportedModel(f"{file}: expected a JSON object")
    return data


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor in the folder's safetensors files, by name."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UnsupportedModel(f"{folder}: no *.safetensors file")
    shapes: dict[str, tuple[int, ...]] = {}
    for file in files:
        shapes.update(read_header(file))
    return shapes


def read_header(file: Path) -> dict[str, tuple[int, ...]]:
    """Read shapes by name from a safetensors header, which must account for every byte of the file."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _LONGEST_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            header = json.loads(stream.read(length))
        end = max((entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"), default=0)
        if (size := file.stat().st_size) != 8 + length + end:
            raise ValueError(f"{size} bytes, its header describes {8 + length + end}")
        return {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise EngineError(f"{file} cannot be read: {error}") from error
