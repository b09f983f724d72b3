"""Sequences that begin with the same tokens as a tree, in which a shared token occurs once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from rollmesh.types import Int32Array

Int64Array = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """Tokens between two forks, at ``start:end`` of the packed row; all that continues them is at ``end:stop``."""

    start: int
    end: int
    stop: int
    depth: int
    """Number of tokens before the branch, on the way from the root."""
    source: int
    """A sequence that has these tokens."""
    parent: int
    """Index of the branch before it; -1 at the root."""


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Branches in depth-first order."""

    branches: tuple[Branch, ...]
    last: tuple[int, ...]
    """By sequence, the branch that it ends with; -1 for a sequence without tokens."""

    def path(self, index: int) -> Int64Array:
        """Return the rows of the tokens from the root to the end of a branch."""
        spans = []
        while index >= 0:
            branch = self.branches[index]
            spans.append(np.arange(branch.start, branch.end))
            index = branch.parent
        return np.concatenate(spans[::-1]) if spans else np.empty(0, np.int64)


def prefix_tree(sequences: Sequence[Int32Array], least_saved: int | None) -> PrefixTree:
    """Build the tree of token ids (>= 0). Tokens are shared where that saves at least ``least_saved`` tokens in all.

    None shares nothing: every sequence is a branch, in the given order. A shared stretch that saves less is repeated in
    each of its continuations.
    """
    order, common = list(range(len(sequences))), [0] * len(sequences)
    if least_saved is not None:
        # Big-endian bytes have the order of the token ids; a prefix comes before what continues it.
        order.sort(key=[ids.astype(">i4").tobytes() for ids in sequences].__getitem__)
        common[1:] = [_common(sequences[a], sequences[b]) for a, b in pairwise(order)]
    found: list[tuple[int, int, int, int]] = []  # length, depth, source, parent
    last = [-1] * len(sequences)
    pending = [(0, len(order), 0, -1)] if order else []
    while pending:
        # Sequences low:high of the order share ``depth`` tokens, which ``parent`` ends, and more of them as a rule.
        low, high, depth, parent = pending.pop()
        source = order[low]
        shared = min(common[low + 1 : high], default=len(sequences[source]))
        cuts = [low, *(i for i in range(low + 1, high) if common[i] == shared), high]
        if shared > depth and (high - low == 1 or (len(cuts) - 2) * (shared - depth) >= (least_saved or 1)):
            found.append((shared - depth, depth, source, parent))
            depth, parent = shared, len(found) - 1
        if high - low == 1:
            last[source] = parent
        else:
            pending += [(a, b, depth, parent) for a, b in reversed(list(pairwise(cuts)))]
    ends = np.cumsum([length for length, _, _, _ in found]).tolist()
    stops = list(ends)
    for index in range(len(found) - 1, -1, -1):
        if (parent := found[index][3]) >= 0:
            stops[parent] = max(stops[parent], stops[index])
    branches = tuple(
        Branch(start=end - length, end=end, stop=stop, depth=depth, source=source, parent=parent)
        for (length, depth, source, parent), end, stop in zip(found, ends, stops, strict=True)
    )
    return PrefixTree(branches, tuple(last))


def _common(a: Int32Array, b: Int32Array) -> int:
    """Return the number of tokens that both begin with."""
    size = min(len(a), len(b))
    differ = a[:size] != b[:size]
    first = int(differ.argmax()) if size else 0
    return first if size and differ[first] else size
