"""Demonstrations for the warm start: random search in the grammar of the task; and the rows of ``rollmesh init``.

A searcher tries random pairs with random signs until a result matches the target, and sometimes repeats an earlier
trial. A persistent searcher never gives up; the others give up with a fixed probability after each miss. A model that
imitates the mixture can do the arithmetic, sometimes searches for long, and gives up far too often. This leaves room
for reinforcement learning, and gives response lengths a long tail from the start.
"""

import json
import random
from dataclasses import dataclass

from rollmesh.tasks.countdown import Puzzle, draw_puzzle

STARTER_ROWS = 2_048
_STARTER_SEED = 20_260_101


@dataclass(frozen=True, slots=True, kw_only=True)
class SearcherMix:
    """Mixture of the searchers that generate the demonstrations."""

    persistent_share: float = 0.25
    """Share of searchers that never give up."""
    give_up_probability: float = 0.3
    """Probability that the other searchers give up after a miss."""
    repeat_probability: float = 0.3
    """Probability that a trial after the first repeats an earlier trial of the same search."""
    max_trials: int = 51
    """Maximum trials of a search, set by the response budget of 512 tokens; a search cut here has no end mark."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """Puzzle with the response of one searcher."""

    puzzle: Puzzle
    response: str
    solved: bool


def demonstrate(rng: random.Random, puzzle: Puzzle, mix: SearcherMix) -> Demonstration:
    """Search the puzzle at random and write every trial into the response."""
    give_up_probability = 0.0 if rng.random() < mix.persistent_share else mix.give_up_probability
    words: list[str] = []
    trials: list[_Pick] = []
    for trial in range(mix.max_trials):
        repeats = bool(trials) and rng.random() < mix.repeat_probability
        pick = rng.choice(trials) if repeats else _pick(rng, puzzle)
        trials.append(pick)
        words += pick.words(puzzle.target)
        if pick.result == puzzle.target:
            return Demonstration(puzzle=puzzle, response=" ".join([*words, "!"]), solved=True)
        if rng.random() < give_up_probability:
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


def draw_demonstration(rng: random.Random, mix: SearcherMix) -> Demonstration:
    """Draw a demonstration for a random puzzle of 5 to 8 numbers of the train split."""
    return demonstrate(rng, draw_puzzle(rng, "train", 5, 8), mix)


def starter_rows() -> str:
    """Return distinct puzzles as JSON lines; the same ones on every machine."""
    rng = random.Random(_STARTER_SEED)
    rows: dict[str, str] = {}
    while len(rows) < STARTER_ROWS:
        puzzle = draw_puzzle(rng, "train", 5, 8)
        row = {"prompt": puzzle.text, "answer": puzzle.target, "numbers": list(puzzle.numbers)}
        rows[puzzle.text] = json.dumps(row)
    return "".join(f"{row}\n" for row in rows.values())
