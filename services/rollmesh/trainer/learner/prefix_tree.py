"""Sequences that begin alike as a tree, in which a shared token occurs once, and micro-batches balanced by it."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter

import numpy as np

from rollmesh.types import Int32Array, Int64Array


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


_ROOM = 1.25
"""Size of a bin whose sequences are longer than the budget, against the longest of them."""
_FINER = (1, 2, 4)
"""Parts of a rank's share to try as limits of what stays together: small parts are balanced, and repeat more tokens."""


def prefix_bins(
    sequences: Sequence[Int32Array], budget: int, multiple: int = 1, least_saved: int | None = None
) -> list[list[int]]:
    """Distribute the indices of ``sequences`` over balanced bins of at most ``budget`` computed tokens.

    ``multiple`` is that of ``balanced_bins``, ``least_saved`` that of ``prefix_tree``. What begins alike stays in one
    bin where it fits, unless several ranks end sooner when its continuations are distributed. Where a sequence is
    longer than the budget, a bin has up to 1.25 times the tokens of the longest one.
    """
    inputs = [ids[:-1] for ids in sequences]
    longest = max(map(len, inputs), default=0)
    most = budget if longest <= budget else int(longest * _ROOM)
    tree = prefix_tree(inputs, least_saved)

    def computed(unit: list[int]) -> int:
        branches = prefix_tree([inputs[s] for s in unit], least_saved).branches
        return branches[-1].end if branches else 0

    units = [_units(tree, most, 1)]
    if multiple > 1:
        units += [*(_units(tree, most, multiple * finer) for finer in _FINER), [[s] for s in range(len(inputs))]]
    return min((_dealt(each, list(map(computed, each)), budget, multiple) for each in units), key=itemgetter(0))[1]


def _dealt(units: Sequence[list[int]], sizes: Sequence[int], budget: int, multiple: int) -> tuple[int, list[list[int]]]:
    """Return the bins of units, the largest first, and the tokens that a rank computes or waits for.

    The ranks compute one micro-batch each at a time, until the largest of them ends.
    """
    bins = balanced_bins(sizes, budget, multiple)
    loads = sorted(((sum(sizes[i] for i in chosen), chosen) for chosen in bins), reverse=True)
    return sum(load for load, _ in loads[::multiple]), [[s for i in chosen for s in units[i]] for _, chosen in loads]


def _units(tree: PrefixTree, most: int, shares: int) -> list[list[int]]:
    """Return the sequences that are not divided between bins: at most ``most`` tokens, or one of ``shares`` of all."""
    count = len(tree.branches)
    children: list[list[int]] = [[] for _ in range(count + 1)]  # the last one is the root, index -1
    members: list[list[int]] = [[] for _ in range(count + 1)]  # sequences that end with the branch, then all below it
    for sequence, last in enumerate(tree.last):
        members[last].append(sequence)
    ending = [list(sequences) for sequences in members]
    for index in range(count - 1, -1, -1):
        parent = tree.branches[index].parent
        children[parent].append(index)
        if parent >= 0:
            members[parent] += members[index]
    total = sum(branch.end - branch.start for branch in tree.branches)

    units: list[list[int]] = []
    pending = [-1]
    while pending:
        index = pending.pop()
        before = size = 0  # tokens up to the fork; tokens from the parent on
        if index >= 0:
            branch = tree.branches[index]
            before, size = branch.depth + branch.end - branch.start, branch.stop - branch.start
        parts = [([sequence], 0) for sequence in ending[index]]
        for child in children[index]:
            branch = tree.branches[child]
            own = branch.stop - branch.start
            if children[child] and (before + own > most or own * shares > total):
                pending.append(child)
            else:
                parts.append((members[child], own))
        if index < 0:
            units = [sequences for sequences, _ in parts]
            continue
        for chosen in balanced_bins([own for _, own in parts], most - before, max(1, -(-size * shares // total))):
            if chosen:
                units.append([s for i in chosen for s in parts[i][0]])
    return units


def balanced_bins(lengths: Sequence[int], budget: int, multiple: int = 1) -> list[list[int]]:
    """Distribute the indices of ``lengths`` over balanced bins of at most ``budget`` tokens.

    The number of bins is a multiple of ``multiple``. Each sequence, longest first, goes into the emptiest bin with
    enough room, or into a new bin. A sequence longer than the budget has a bin to itself. At most ``multiple - 1`` bins
    are empty; none with ``multiple`` 1. After AReaL's Algorithm 1 (arXiv 2505.24298), with tokens instead of sequences
    as the load.
    """
    if not lengths:
        return []
    # A sequence longer than the budget counts as one full bin, so there are at least as many sequences as bins.
    fewest = -(-sum(min(length, budget) for length in lengths) // budget)
    count = -(-fewest // multiple) * multiple
    while True:
        bins = _fill(lengths, budget, count)
        if len(bins) % multiple == 0:
            return bins
        count = -(-len(bins) // multiple) * multiple


def _fill(lengths: Sequence[int], budget: int, count: int) -> list[list[int]]:
    bins: list[list[int]] = [[] for _ in range(count)]
    load = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        fits = [b for b in range(len(bins)) if load[b] + lengths[index] <= budget or not bins[b]]
        if fits:
            target = min(fits, key=lambda b: (load[b], b))
        else:
            target = len(bins)
            bins.append([])
            load.append(0)
        bins[target].append(index)
        load[target] += lengths[index]
    return bins
