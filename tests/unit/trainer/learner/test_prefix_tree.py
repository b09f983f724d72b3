"""Prefix trees: every token once, on the path of its sequence; bins by what is computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.trainer.learner.prefix_tree import PrefixTree, prefix_bins, prefix_tree
from rollmesh.types import Int32Array

WORDS = st.lists(st.integers(0, 2), max_size=9)
"""Few tokens, so that many sequences begin alike, are equal, or continue another one."""
SEQUENCES = st.lists(WORDS, max_size=14)


def arrays(sequences: list[list[int]]) -> list[Int32Array]:
    return [np.array(ids, np.int32) for ids in sequences]


def beginnings(sequences: list[list[int]]) -> set[tuple[int, ...]]:
    """All distinct beginnings: the nodes of a trie, counted by a set."""
    return {tuple(ids[:n]) for ids in sequences for n in range(1, len(ids) + 1)}


def row_of(tree: PrefixTree, sequences: list[Int32Array]) -> tuple[list[int], list[int]]:
    tokens, positions = list[int](), list[int]()
    for branch in tree.branches:
        assert branch.start == len(tokens) < branch.end <= branch.stop
        places = range(branch.depth, branch.depth + branch.end - branch.start)
        tokens += sequences[branch.source][places.start : places.stop].tolist()
        positions += places
    return tokens, positions


@given(SEQUENCES, st.sampled_from([None, 1, 2, 5, 30]))
def test_the_path_of_a_sequence_spells_it_at_its_positions(words: list[list[int]], least_saved: int | None) -> None:
    sequences = arrays(words)
    tree = prefix_tree(sequences, least_saved)
    tokens, positions = row_of(tree, sequences)
    for ids, last in zip(words, tree.last, strict=True):
        path = tree.path(last).tolist()
        assert [tokens[row] for row in path] == ids
        assert [positions[row] for row in path] == list(range(len(ids)))
    whole = sum(map(len, words))
    assert len(tokens) == {None: whole, 1: len(beginnings(words))}.get(least_saved, len(tokens))
    assert len(beginnings(words)) <= len(tokens) <= whole


@given(SEQUENCES)
def test_what_continues_a_branch_follows_it_in_the_row(words: list[list[int]]) -> None:
    tree = prefix_tree(arrays(words), 1)
    for row, branch in enumerate(tree.branches):
        above = set[int]()
        parent = branch.parent
        while parent >= 0:
            above.add(parent)
            parent = tree.branches[parent].parent
        for other, candidate in enumerate(tree.branches):
            inside = candidate.end <= branch.start and branch.end <= candidate.stop
            assert inside == (other in above), (row, other)


def test_a_stretch_is_shared_only_where_it_saves_enough() -> None:
    group = [[1, 2, 3, 10 + i] for i in range(4)]  # the prompt is saved three times: 9 tokens
    assert len(row_of(prefix_tree(arrays(group), 9), arrays(group))[0]) == 3 + 4
    assert len(row_of(prefix_tree(arrays(group), 10), arrays(group))[0]) == 4 * 4
    # Two groups have their first token in common, which saves one; each computes it, and shares its own prompt.
    other = [[1, 7, 8, 10 + i] for i in range(4)]
    assert len(row_of(prefix_tree(arrays([*group, *other]), 9), arrays([*group, *other]))[0]) == 2 * (3 + 4)
    assert prefix_tree(arrays(group), None).last == (0, 1, 2, 3)


@given(SEQUENCES, st.integers(1, 40), st.integers(1, 3), st.sampled_from([None, 1, 4]))
def test_bins_of_trees_hold_every_sequence_once_within_the_budget(
    words: list[list[int]], budget: int, multiple: int, least_saved: int | None
) -> None:
    sequences = arrays([[*ids, 0] for ids in words])  # the last token is no input
    bins = prefix_bins(sequences, budget, multiple, least_saved)
    assert sorted(i for b in bins for i in b) == list(range(len(words)))
    assert len(bins) % multiple == 0
    longest = max(map(len, words), default=0)
    for chosen in bins:
        computed = len(
            row_of(prefix_tree(arrays([words[i] for i in chosen]), least_saved), arrays([words[i] for i in chosen]))[0]
        )
        assert computed <= (budget if longest <= budget else max(budget, int(1.25 * longest)))


def test_a_group_stays_in_one_bin_where_it_fits_and_its_prompt_is_computed_once() -> None:
    rng = np.random.default_rng(0)
    groups = [rng.integers(0, 50, 40) for _ in range(6)]
    sequences = [
        np.concatenate([prompt, rng.integers(0, 50, 11)]).astype(np.int32) for prompt in groups for _ in range(4)
    ]
    order = rng.permutation(24)
    bins = prefix_bins([sequences[i] for i in order], 170, least_saved=1)  # two groups of 40 + 4 * 10 tokens
    assert [len(b) for b in bins] == [8, 8, 8]
    assert all(len({int(order[i]) // 4 for i in b}) == 2 for b in bins)


def test_a_group_above_the_budget_is_divided_into_as_few_bins_as_hold_it() -> None:
    prompt = np.arange(2048) % 90
    group = [np.concatenate([prompt, np.full(513, 100 + i)]).astype(np.int32) for i in range(16)]
    assert sorted(map(len, prefix_bins(group, 4096, least_saved=1))) == [4, 4, 4, 4]
    # A prompt above the budget: the answers stay with it, in bins of 1.25 times the longest trajectory.
    assert len(prefix_bins(group, 1024, least_saved=1)) == 8
    assert sorted(map(len, prefix_bins(group[:8], 8192, 2, 1))) == [4, 4]  # one for each rank


@pytest.mark.parametrize(("groups", "ranks"), [(3, 2), (4, 3), (5, 4), (10, 8), (8, 8)])
def test_ranks_wait_for_no_more_tokens_than_without_sharing(groups: int, ranks: int) -> None:
    rng = np.random.default_rng(0)
    sequences = [
        np.concatenate([prompt, rng.integers(0, 1000, rng.integers(50, 150))]).astype(np.int32)
        for prompt in rng.integers(0, 1000, (groups, 24))
        for _ in range(8)
    ]

    def waited(least_saved: int | None) -> int:
        bins = prefix_bins(sequences, 8192, ranks, least_saved)
        rows = [row_of(prefix_tree(each, least_saved), each)[0] for each in ([sequences[i] for i in b] for b in bins)]
        return sum(max(map(len, rows[at : at + ranks])) for at in range(0, len(rows), ranks))

    assert waited(96) <= waited(None)
