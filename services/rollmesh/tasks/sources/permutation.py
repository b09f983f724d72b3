"""Order of the rows of an epoch, a function of (seed, epoch) alone.

numpy and random do not guarantee a stable shuffle across releases, and a cursor outlives an upgrade. So rows are sorted
by a hash that is implemented here (splitmix64).
"""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]


class EpochOrders:
    """Orders of the rows of one source. The order used last is kept: to sort a large table takes long."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._kept: tuple[int, Int64Array] | None = None
        """(epoch, order)."""

    def row(self, epoch: int, index: int) -> int:
        """Return the row at a position of an epoch."""
        kept = self._kept
        if kept is None or kept[0] != epoch:
            kept = self._kept = (epoch, epoch_order(self._size, self._seed, epoch))
        return int(kept[1][index])


def epoch_order(size: int, seed: int, epoch: int) -> Int64Array:
    """Return a permutation of range(size), int64 [size], read-only; O(size log size)."""
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
