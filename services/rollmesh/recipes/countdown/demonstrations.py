"""Demonstrations for the warm start: honest random search, written out in the grammar of the task.

A searcher tries a random pair with a random sign until one hits the target, and now and then repeats what it has tried
before. A patient searcher never gives up; an impatient one gives up with a fixed probability after each miss. A model
that imitates the mixture knows the arithmetic, searches at length now and then, and gives up far too often:
reinforcement learning has something to find, and response lengths have a long tail from the start.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from rollmesh.tasks.sources.countdown import Puzzle, draw_puzzle


@dataclass(frozen=True, slots=True, kw_only=True)
class SearcherMix:
    """Who writes the demonstrations."""

    patient_share: float = 0.25
    """Share of searchers that never give up."""
    give_up_probability: float = 0.3
    """Chance that the others give up after a miss."""
    repeat_probability: float = 0.3
    """Chance that a trial after the first repeats an earlier one of the same search."""
    max_trials: int = 51
    """A patient search is cut here, without an end mark: the response budget of 512 tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """One puzzle and one searcher's response."""

    puzzle: Puzzle
    response: str
    solved: bool


def demonstrate(rng: random.Random, puzzle: Puzzle, mix: SearcherMix) -> Demonstration:
    """Search the puzzle at random and write every trial down."""
    patience = 0.0 if rng.random() < mix.patient_share else mix.give_up_probability
    words: list[str] = []
    tried: list[_Pick] = []
    for trial in range(mix.max_trials):
        repeats = bool(tried) and rng.random() < mix.repeat_probability
        pick = rng.choice(tried) if repeats else _pick(rng, puzzle)
        tried.append(pick)
        words += pick.words(puzzle.target)
        if pick.result == puzzle.target:
            return Demonstration(puzzle=puzzle, response=" ".join([*words, "!"]), solved=True)
        if rng.random() < patience:
            return Demonstration(puzzle=puzzle, response=" ".join([*words, "?"]), solved=False)
        if trial < mix.max_trials - 1:
            words.append(",")
    return Demonstration(puzzle=puzzle, response=" ".join(words), solved=False)


@dataclass(frozen=True, slots=True)
class _Pick:
    first: int
    sign: str
    second: int

    @property
    def result(self) -> int:
        return self.first + self.second if self.sign == "+" else self.first - self.second

    def words(self, target: int) -> list[str]:
        difference = abs(self.result - target)
        return f"{self.first} {self.sign} {self.second} = {self.result} ~ {target} = {difference}".split()


def _pick(rng: random.Random, puzzle: Puzzle) -> _Pick:
    first, second = rng.sample(puzzle.numbers, 2)
    if rng.random() < 0.5:
        return _Pick(first, "+", second)
    return _Pick(max(first, second), "-", min(first, second))


def draw_demonstration(
    rng: random.Random, mix: SearcherMix, min_numbers: int = 5, max_numbers: int = 8
) -> Demonstration:
    """A demonstration for a random puzzle of the train split."""
    return demonstrate(rng, draw_puzzle(rng, "train", min_numbers, max_numbers), mix)
