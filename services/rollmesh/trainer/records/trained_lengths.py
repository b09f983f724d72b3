"""Trained lengths: groups by the length decile of their longest trajectory.

The decile is computed like the queue's (``store/scripts/lib/lengths.lua``), so trained and dropped groups are
comparable. Dropping long groups is a bias that a mean length does not show.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rollmesh.types import Batch

DECILES = 10


def length_decile(tokens: int, finished: Mapping[int, int]) -> int:
    """Return the decile (0 to 9) of a length among the finished trajectories, given as counts by length bucket."""
    bucket = math.floor(math.log2(tokens + 1) * 4)
    below = sum(count for other, count in finished.items() if other < bucket)
    total = sum(finished.values())
    return min(DECILES - 1, DECILES * below // total) if total else 0


def trained_by_decile(batch: Batch, finished: Mapping[int, int]) -> list[int]:
    """Count the groups of a batch by length decile, [10]."""
    counts = [0] * DECILES
    for group in batch.groups:
        longest = max((t.response_token_count for t in group.trajectories), default=0)
        counts[length_decile(longest, finished)] += 1
    return counts


def dropped_by_decile(drop_deciles: Mapping[str, int]) -> list[int]:
    """Sum dropped groups by length decile, [10], from counts by ``<reason>:<decile>``."""
    counts = [0] * DECILES
    for name, count in drop_deciles.items():
        counts[int(name.rpartition(":")[2])] += count
    return counts


def trained_share(trained: Sequence[int], dropped: Sequence[int]) -> list[float | None]:
    """Compute trained / (trained + dropped) by decile; None where no group has left the queue yet."""
    return [t / (t + d) if t + d else None for t, d in zip(trained, dropped, strict=True)]
