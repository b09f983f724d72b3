"""Sets of tokens kept by truncated sampling: parts, joins, checks and their compressed form."""

import zlib
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from rollmesh.errors import DataError
from rollmesh.types import Int32Array, KeptSets, Trajectory

_INT32 = np.dtype("<i4")
_LEVEL = 1
"""Level of zlib: a higher one takes several times as long and saves a few percent."""


def stack_sets(sets: Sequence[Int32Array]) -> KeptSets:
    """Return the ascending ids of at least one token's set after another's."""
    return KeptSets(counts=np.array([len(ids) for ids in sets], np.int32), ids=np.concatenate(sets))


def split_sets(sets: KeptSets) -> list[Int32Array]:
    """Return the ids of each token's set; the inverse of ``stack_sets``."""
    return np.split(sets.ids, np.cumsum(sets.counts)[:-1])


def slice_sets(sets: KeptSets, start: int, end: int | None = None) -> KeptSets:
    """Return the sets of the tokens from ``start`` up to ``end``."""
    ends = np.concatenate(([0], np.cumsum(sets.counts, dtype=np.int64)))
    first, last, _ = slice(start, end).indices(len(sets))
    return KeptSets(counts=sets.counts[start:end], ids=sets.ids[ends[first] : ends[max(first, last)]])


def join_sets(parts: Iterable[tuple[int, KeptSets | None]]) -> KeptSets | None:
    """Join the sets of runs of tokens in order, each its number of tokens and its sets; None if no run has any."""
    runs = list(parts)
    if all(sets is None for _, sets in runs):
        return None
    counts = [np.zeros(length, np.int32) if sets is None else sets.counts for length, sets in runs]
    ids = [sets.ids for _, sets in runs if sets is not None]
    return KeptSets(counts=np.concatenate(counts), ids=np.concatenate(ids))


def trajectory_sets(trajectory: Trajectory) -> KeptSets | None:
    """Return the sets of all tokens of a trajectory, prompt included."""
    segments = ((len(segment), segment.kept_sets) for segment in trajectory.segments)
    return join_sets([(len(trajectory.prompt.token_ids), None), *segments])


def choose_sets(sets: KeptSets | None, chosen: npt.NDArray[np.bool_]) -> KeptSets | None:
    """Return the sets of the ``chosen`` tokens, bool [tokens]."""
    return sets and KeptSets(counts=sets.counts[chosen], ids=sets.ids[np.repeat(chosen, sets.counts)])


def pair_sets(sets: KeptSets | None, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return the sets of the tokens ``index`` as pairs (place in ``index``, id), [2, ids]; None without any id."""
    if sets is None or not (counts := sets.counts[index]).any():
        return None
    places = np.repeat(np.arange(len(index)), counts)
    firsts = (np.cumsum(sets.counts, dtype=np.int64) - sets.counts)[index]
    before = np.cumsum(counts, dtype=np.int64) - counts
    at = np.arange(len(places)) + (firsts - before)[places]
    return np.stack((places, sets.ids[at].astype(np.int64)))


def check_sets(sets: KeptSets, token_ids: Int32Array) -> None:
    """Raise DataError unless there is one set per token, each ascending and with its own token."""
    counts, ids = sets.counts, sets.ids
    if len(counts) != len(token_ids):
        raise DataError(f"kept_sets: {len(counts)} sets for {len(token_ids)} tokens")
    _check_counts(counts, len(ids))
    owners = np.repeat(np.arange(len(counts)), counts)
    if ((np.diff(ids) <= 0) & (np.diff(owners) == 0)).any() or (len(ids) and ids.min() < 0):
        raise DataError("kept_sets: the ids of a set must be at least 0 and ascend, each once")
    found = np.zeros(len(counts), bool)
    found[owners[ids == token_ids[owners]]] = True
    lacking = np.flatnonzero(~found & (counts > 0))
    if len(lacking):
        at = int(lacking[0])
        raise DataError(f"kept_sets: set {at} has {counts[at]} ids, but not that of its token, {token_ids[at]}")


def pack_sets(sets: KeptSets) -> bytes:
    """Compress sets: sizes, then ids as differences within their set; the bytes of equal weight stand together."""
    firsts = (np.cumsum(sets.counts, dtype=np.int64) - sets.counts)[sets.counts > 0]
    steps = np.diff(sets.ids, prepend=0)
    steps[firsts] = sets.ids[firsts]
    values = np.concatenate((sets.counts, steps)).astype(_INT32)
    return zlib.compress(values.view(np.uint8).reshape(-1, _INT32.itemsize).T.tobytes(), _LEVEL)


def unpack_sets(data: bytes, token_count: int) -> KeptSets:
    """Decompress the sets of ``token_count`` tokens; DataError if the bytes are no such sets."""
    try:
        plain = np.frombuffer(zlib.decompress(data), np.uint8)
    except zlib.error as error:
        raise DataError(f"kept_sets: {error}") from error
    if len(plain) % _INT32.itemsize or len(plain) < token_count * _INT32.itemsize:
        raise DataError(f"kept_sets: {len(plain)} bytes for {token_count} tokens")
    values = np.ascontiguousarray(plain.reshape(_INT32.itemsize, -1).T).view(_INT32).ravel()
    counts, steps = values[:token_count], values[token_count:]
    _check_counts(counts, len(steps))
    totals = np.cumsum(steps, dtype=np.int64)
    before = np.concatenate(([0], totals))[np.cumsum(counts, dtype=np.int64) - counts]
    ids = totals - np.repeat(before, counts)
    return KeptSets(counts=counts, ids=ids.astype(np.int32))


def _check_counts(counts: Int32Array, id_count: int) -> None:
    total = int(counts.sum(dtype=np.int64))
    if (counts < 0).any() or total != id_count:
        raise DataError(f"kept_sets: expected counts of at least 0 with a sum of {id_count}, got {total}")
