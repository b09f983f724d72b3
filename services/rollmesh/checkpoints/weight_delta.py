"""Deltas: a weight file as its difference to the same file of another policy version.

At the learning rates of RL most bfloat16 weights keep their bits from one version to the next: the XOR of two versions
is nearly all zeros, which zstd shrinks. The result is exact, and its digest is in the manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import zstandard

from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError

SUFFIX = ".delta"
_BLOCK_BYTES = 4 << 20
_LEVEL = 1
"""Level of zstd; higher ones gain little on zeros."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenDelta:
    """Digests of a delta and of the file that it was made from, sha256 (hex)."""

    sha256: str
    base_sha256: str


def write_delta(base: Path, new: Path, delta: Path) -> WrittenDelta:
    """Write the compressed XOR of two files of the same size. Raises ValueError if the sizes differ."""
    digest, base_digest = hashlib.sha256(), hashlib.sha256()
    compress = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True).compressobj()
    with base.open("rb") as before, new.open("rb") as after, delta.open("wb") as file:
        for block in _blocks(after):
            old = before.read(len(block))
            base_digest.update(old)
            data = compress.compress(_xor(block, old))
            digest.update(data)
            file.write(data)
        end = compress.flush()
        digest.update(end)
        file.write(end)
    return WrittenDelta(sha256=digest.hexdigest(), base_sha256=base_digest.hexdigest())


def apply_delta(base: Path, delta: Path, target: Path) -> None:
    """Write the file that ``delta`` makes of ``base``, for the caller to compare with its digest.

    The file has the size of the base: a delta of another size raises CheckpointError (tampered), as does one that zstd
    cannot read.
    """
    with base.open("rb") as before, delta.open("rb") as compressed, target.open("xb") as file:
        try:
            with zstandard.ZstdDecompressor().stream_reader(compressed) as difference:
                for block in _blocks(before):
                    file.write(_xor(block, difference.read(len(block))))
                rest = difference.read(1)
        except (zstandard.ZstdError, ValueError) as error:
            raise CheckpointError(f"{delta}: no delta of {base}: {error}", reason=Reason.TAMPERED) from error
    if rest:
        raise CheckpointError(f"{delta}: no delta of {base}: it is longer", reason=Reason.TAMPERED)


def _blocks(file: BinaryIO) -> Iterator[bytes]:
    while block := file.read(_BLOCK_BYTES):
        yield block


def _xor(left: bytes, right: bytes) -> bytes:
    """Combine two blocks. Raises ValueError if their lengths differ."""
    if len(left) != len(right):
        raise ValueError(f"a block has {len(right)} bytes, expected {len(left)}")
    return np.bitwise_xor(np.frombuffer(left, np.uint8), np.frombuffer(right, np.uint8)).tobytes()
