"""Countdown prompts: the same everywhere, solvable, and never shared between training and evaluation."""

import itertools
import random
from collections import Counter

import numpy as np
import pytest

from rollmesh.config.data import CountdownSource
from rollmesh.errors import ConfigError
from rollmesh.tasks.countdown import CountdownPrompts, Puzzle, draw_puzzle
from rollmesh.tasks.sources.source_protocol import PromptSource, SourceSettings, Split
from rollmesh.types import Int32Array

PINNED = ["4 9 2 6 1 5 8 > 3 :", "7 4 6 1 9 8 5 > 3 :", "4 1 2 5 8 7 > 7 :"]
"""The first prompts of the demo's evaluation."""


class Words:
    """A tokenizer of one token per word."""

    def encode(self, text: str) -> Int32Array:
        return np.array([ord(word[0]) for word in text.split()], np.int32)


def source(seed: int = 0, split: Split = "train", low: int = 5, high: int = 8) -> CountdownPrompts:
    settings = SourceSettings(
        tokenizer=Words(),  # type: ignore[arg-type]
        seed=seed,
        split=split,
        shuffle=True,
        max_prompt_tokens=64,
        held_out_ratio=0.0,
        keep_messages=False,
        on_checked=None,
    )
    return CountdownPrompts(CountdownSource.model_construct(min_numbers=low, max_numbers=high), settings)


def test_the_same_position_is_the_same_prompt_in_any_order_of_access() -> None:
    first, second = source(), source()
    forward = [first.prompt(1, i) for i in range(20)]
    backward = [second.prompt(1, i) for i in reversed(range(20))][::-1]
    assert [p.prompt_id for p in forward] == [p.prompt_id for p in backward]
    assert [p.metadata for p in forward] == [p.metadata for p in backward]
    assert all((a.token_ids == b.token_ids).all() for a, b in zip(forward, backward, strict=True))


def test_the_prompts_of_a_seed_never_change_between_releases() -> None:
    """The cursor of a run outlives an upgrade, and the fixed evaluation stays comparable."""
    evaluation = source(seed=20_000_000, split="eval")
    assert [evaluation.puzzle(0, i).text for i in range(3)] == PINNED


def test_seeds_epochs_and_indices_give_different_prompts() -> None:
    shown = Counter(
        source(seed=seed).puzzle(epoch, index).text for seed in (0, 1) for epoch in (0, 1) for index in range(50)
    )
    assert len(shown) > 190


def test_every_puzzle_has_distinct_digits_in_range_and_two_solutions() -> None:
    prompts = source()
    puzzles = [prompts.puzzle(0, i) for i in range(400)]
    assert {len(p.numbers) for p in puzzles} == {5, 6, 7, 8}
    for puzzle in puzzles:
        assert len(set(puzzle.numbers)) == len(puzzle.numbers)
        assert set(puzzle.numbers) <= set(range(1, 10))
        hits = [
            (a, b)
            for a, b in itertools.permutations(puzzle.numbers, 2)
            if a - b == puzzle.target or (a < b and a + b == puzzle.target)
        ]
        assert len(hits) == puzzle.solution_count >= 2


@pytest.mark.parametrize("size", range(2, 10))
@pytest.mark.parametrize("split", ["train", "eval"])
def test_every_size_has_puzzles_in_both_splits(size: int, split: Split) -> None:
    puzzle = draw_puzzle(random.Random(0), split, size, size)
    assert len(puzzle.numbers) == size
    assert puzzle.held_out == (split == "eval")


def test_training_and_evaluation_share_no_digit_set_and_target_whatever_the_seeds() -> None:
    def keys(split: Split, seed: int) -> set[tuple[tuple[int, ...], int]]:
        prompts = source(seed=seed, split=split)
        return {(tuple(sorted(p.numbers)), p.target) for p in (prompts.puzzle(0, i) for i in range(1500))}

    assert not keys("train", 3) & keys("eval", 3)
    assert not keys("train", 4) & keys("eval", 20_000_000)


def test_the_order_of_the_digits_does_not_move_a_puzzle_to_the_other_split() -> None:
    numbers = (9, 4, 1, 7, 6)
    answers = {Puzzle(numbers=order, target=10).held_out for order in itertools.permutations(numbers)}
    assert len(answers) == 1


def test_the_prompt_carries_its_text_and_what_the_verifier_needs() -> None:
    prompts: PromptSource = source()
    prompt = prompts.prompt(0, 7)
    puzzle = source().puzzle(0, 7)
    assert puzzle.text.endswith(f"> {puzzle.target} :")
    assert prompt.token_ids.tolist() == Words().encode(puzzle.text).tolist()
    assert prompt.metadata == {"numbers": list(puzzle.numbers), "target": puzzle.target}
    assert prompt.verifier == "countdown"


@pytest.mark.parametrize(("low", "high"), [(1, 5), (6, 5), (5, 10)])
def test_impossible_sizes_are_refused_with_the_values(low: int, high: int) -> None:
    with pytest.raises(ConfigError, match=f"min_numbers={low}, max_numbers={high}"):
        source(low=low, high=high)
