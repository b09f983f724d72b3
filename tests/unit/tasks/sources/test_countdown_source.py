"""Generated prompts, of countdown and of real reasoning-gym tasks: the same everywhere, and solvable."""

import itertools
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from rollmesh.config.data import CountdownSource, DataConfig
from rollmesh.errors import ConfigError, DataError
from rollmesh.tasks.countdown import CountdownPrompts, Puzzle, draw_puzzle
from rollmesh.tasks.reasoning_gym import entry_from_text, entry_to_text
from rollmesh.tasks.sources.source_protocol import PromptSource, SourceSettings, Split, build_prompt_source
from rollmesh.text import Tokenizer
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


@pytest.fixture(autouse=True, scope="module")
def _reasoning_gym() -> None:
    """Import reasoning-gym only in the process that runs these tests: it imports matplotlib."""
    pytest.importorskip("reasoning_gym")


def open_task(
    tokenizer: Tokenizer, task: str = "chain_sum", *, split: Split = "train", seed: int = 1, **settings: Any
) -> PromptSource:
    source = {"type": "reasoning_gym", "task": task, "size": 20, **settings.pop("source", {})}
    return build_prompt_source(DataConfig.model_validate({"source": source, **settings}), tokenizer, seed, split)


def test_an_item_becomes_a_prompt_with_its_whole_entry(tokenizer: Tokenizer) -> None:
    prompt = open_task(tokenizer).prompt(0, 0)
    entry = entry_from_text(prompt.metadata["entry"])
    assert tokenizer.decode(prompt.token_ids) == entry["question"]
    assert prompt.verifier == "reasoning_gym"
    assert prompt.metadata["task"] == "chain_sum"


def test_positions_are_stable_and_epochs_are_reordered(tokenizer: Tokenizer) -> None:
    first, again = (open_task(tokenizer) for _ in range(2))
    ids = [[s.prompt(e, i).token_ids.tolist() for i in range(20)] for s in (first, again) for e in (0, 1)]
    assert ids[:2] == ids[2:]
    assert ids[0] != ids[1]
    assert sorted(ids[0]) == sorted(ids[1])


def test_evaluation_items_are_generated_from_other_seeds(tokenizer: Tokenizer) -> None:
    train, evaluation = open_task(tokenizer), open_task(tokenizer, split="eval")
    questions = [{tokenizer.decode(s.prompt(0, i).token_ids) for i in range(20)} for s in (train, evaluation)]
    assert not questions[0] & questions[1]


def test_options_reach_the_task(tokenizer: Tokenizer) -> None:
    options = {"min_terms": 6, "max_terms": 6}
    prompt = open_task(tokenizer, source={"options": options}).prompt(0, 0)
    assert entry_from_text(prompt.metadata["entry"])["question"].count("+") + prompt.metadata["entry"].count(" - ") >= 3
    assert prompt.metadata["options"] == '{"max_terms": 6, "min_terms": 6}'


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("chain_summ", {}, "reasoning-gym has no task 'chain_summ'; for example .*chain_sum"),
        ("chain_sum", {"min_termz": 1}, "data.source.options: chain_sum rejects"),
        ("chain_sum", {"min_terms": 9, "max_terms": 2}, "data.source.options: chain_sum rejects"),
    ],
)
def test_a_wrong_task_or_option_is_named(
    tokenizer: Tokenizer, task: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        open_task(tokenizer, task, source={"options": options})


def test_a_question_that_is_too_long_names_its_item(tokenizer: Tokenizer) -> None:
    with pytest.raises(DataError, match=r"reasoning_gym chain_sum:\d+: .* more than data.max_prompt_tokens=8"):
        open_task(tokenizer, max_prompt_tokens=8).prompt(0, 0)


def test_entries_keep_tuples_sets_and_keys_that_are_not_text() -> None:
    entry = {"a": (1, [2.5, (3,)]), "b": {1: "x", (2, 3): None}, "c": {4, 5}, "d": {"$type": "mine"}, "e": True}
    assert entry_from_text(entry_to_text(entry)) == entry


def test_an_entry_that_is_no_entry_is_a_data_error() -> None:
    with pytest.raises(DataError, match="type object has no JSON form"):
        entry_to_text({"a": object()})
    for text in ("{", "[]", '{"$type": "what"}', '{"$type": "tuple"}'):
        with pytest.raises(DataError, match="not an encoded entry"):
            entry_from_text(text)
