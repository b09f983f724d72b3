"""Kept sets: parts and joins are those of lists of sets, their bytes come back, and what is no set is refused."""

import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import DataError
from rollmesh.kept_sets import check_sets, join_sets, pack_sets, slice_sets, unpack_sets
from rollmesh.types import KeptSets

from ..kit.made_batches import sets_of

LARGEST_ID = 2**31 - 1
LISTS = st.lists(st.lists(st.integers(0, LARGEST_ID), max_size=5, unique=True).map(sorted), max_size=8)


def lists_of(sets: KeptSets | None) -> list[list[int]]:
    """The set of every token, by a loop."""
    assert sets.counts.dtype == sets.ids.dtype == np.int32
    rest, lists = sets.ids.tolist(), []
    for count in sets.counts.tolist():
        lists.append(rest[:count])
        rest = rest[count:]
    assert not rest
    return lists


@given(LISTS)
def test_the_bytes_of_sets_give_the_sets(lists: list[list[int]]) -> None:
    assert lists_of(unpack_sets(pack_sets(sets_of(lists)), len(lists))) == lists


@given(LISTS, st.data())
def test_parts_and_joins_are_those_of_the_lists(lists: list[list[int]], data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(lists)))
    end = data.draw(st.one_of(st.none(), st.integers(start, len(lists) + 2)))
    part = slice_sets(sets_of(lists), start, end)
    assert lists_of(part) == lists[start:end]
    assert lists_of(join_sets([(2, None), (len(part), part), (1, None)])) == [[], [], *lists[start:end], []]


def test_runs_without_sets_have_none_together() -> None:
    assert join_sets([(2, None), (3, None)]) is None


def test_the_layout_of_the_bytes_is_that_of_the_contract() -> None:
    """Two tokens, the first from the full vocabulary: the sizes 0 and 2, then 5 and the step of 256 to 261."""
    planes = bytes([0, 2, 5, 0]) + bytes([0, 0, 0, 1]) + bytes(4) + bytes(4)
    assert zlib.decompress(pack_sets(sets_of([[], [5, 261]]))) == planes


def test_sets_of_a_nucleus_take_a_fraction_of_their_ids() -> None:
    """Ten of 152,000 tokens, drawn evenly, are 10 * log2(152000 / 10) + 14 = 153 bits by entropy, 19 bytes."""
    random = np.random.default_rng(0)
    lists = [sorted(random.choice(152_000, 10, replace=False).tolist()) for _ in range(500)]
    assert len(pack_sets(sets_of(lists))) < 500 * 26


@pytest.mark.parametrize(
    ("lists", "tokens", "text"),
    [
        ([[1, 2], [3]], [2, 4], "set 1 has 1 ids, but not that of its token, 4"),
        ([[2, 1]], [2], "ascend"),
        ([[2, 2]], [2], "ascend"),
        ([[-1, 2]], [2], "ascend"),
        ([[1]], [1, 1], "1 sets for 2 tokens"),
    ],
)
def test_a_set_that_is_none_of_its_token_is_refused(lists: list[list[int]], tokens: list[int], text: str) -> None:
    with pytest.raises(DataError, match=text):
        check_sets(sets_of(lists), np.array(tokens, np.int32))


def test_a_token_may_have_no_set_and_neighbours_may_share_ids() -> None:
    check_sets(sets_of([[4, 7], [], [4, 7], [0]]), np.array([7, 9, 4, 0], np.int32))


@pytest.mark.parametrize(
    "data",
    [b"no stream", zlib.compress(b"abc"), zlib.compress(bytes(4)), zlib.compress(bytes([9, 0] + [0] * 6)),
     zlib.compress(bytes([255, 0, 255, 0, 255, 0, 255, 0]))],
    ids=["no zlib", "no int32", "one token of two", "too few ids", "a negative count"],
)  # fmt: skip
def test_bytes_that_are_no_sets_are_refused(data: bytes) -> None:
    with pytest.raises(DataError, match="kept_sets"):
        unpack_sets(data, 2)
