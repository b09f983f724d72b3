"""Weights that a bucket has as differences to another policy version, written in full into a copy of the bucket."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

_SUFFIX = ".delta"


def write_full_weights(root: Path) -> None:
    """Write the full weight files beside the deltas of every policy below ``root``, older versions first.

    A delta is the zstd-compressed XOR of a file with that of the version before. Where the base is missing or is
    another one, nothing is written: the weight file of that policy is then missing.
    """
    found = [(folder, _manifest(folder)) for folder in sorted((root / "policies").glob("[0-9]*-*"))]
    for folder, manifest in sorted(found, key=lambda item: item[1].get("policy_version", -1)):
        delta = manifest.get("delta")
        if delta is None:
            continue
        base = root / delta["base"]["path"]
        if _sha256(base / "manifest.json") != delta["base"]["manifest_digest"]:
            continue
        for file in delta["files"]:
            name = file["path"].removesuffix(_SUFFIX)
            if (base / name).is_file() and _sha256(folder / file["path"]) == file["sha256"]:
                (folder / name).write_bytes(_combined((base / name).read_bytes(), (folder / file["path"]).read_bytes()))


def delta_count(root: Path) -> int:
    """Return the number of policies below ``root`` that are stored as deltas."""
    return sum(_manifest(folder).get("delta") is not None for folder in (root / "policies").glob("[0-9]*-*"))


def _combined(base: bytes, delta: bytes) -> bytes:
    """Return the new file; of another length if the delta is not for this base."""
    difference = zstandard.ZstdDecompressor().decompressobj().decompress(delta)
    length = min(len(base), len(difference))
    return np.bitwise_xor(
        np.frombuffer(base[:length], np.uint8), np.frombuffer(difference[:length], np.uint8)
    ).tobytes()


def _manifest(folder: Path) -> Mapping[str, Any]:
    """Return the manifest of a policy; empty without one, and for one that cannot be read, which the ledger names."""
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return manifest


def _sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
