"""Order of the rows of an epoch, a function of (seed, epoch) alone.

numpy and random do not guarantee a stable shuffle across releases, and a cursor outlives an upgrade. So rows are sorted
by a hash that is implemented here (splitmix64).
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


@lru_cache(maxsize=4)
def epoch_order(size: int, seed: int, epoch: int) -> Int64Array:
    """Return a permutation of range(size), int64 [size], read-only; O(size log size) once per epoch."""
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "big"))
    hashes = _splitmix64(np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)
    order = np.argsort(hashes, kind="stable")
    order.setflags(write=False)
    return order


def _splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection that mixes every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
