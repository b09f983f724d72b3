"""Countdown search, the task of the demo: an unlimited number of generated puzzles.

A puzzle is a set of distinct digits and a target. Two of the digits, added or subtracted, give the target. The model
writes one trial after the other, each with its distance to the target. A prompt and its response::

    9 8 7 4 5 6 1 > 12 :   1 + 7 = 8 ~ 12 = 4 , 9 - 6 = 3 ~ 12 = 9 , 4 + 8 = 12 ~ 12 = 0 !

Grammar, one token per number and per sign, separated by spaces::

    prompt   = digit { digit } ">" target ":"
    response = trial { "," trial } ( "!" | "?" )
    trial    = number ( "+" | "-" ) number "=" result "~" target "=" difference

``difference`` is ``|result - target|``. ``!`` claims that the last trial reaches the target; ``?`` gives up.
A trial and the mark behind it are 10 tokens, so the length of a response is 10 times a roughly geometric number of
trials. A response is correct if it meets all these conditions:

* it ends with ``!``;
* the words after the last ``,`` are exactly one trial, ``a + b = r ~ t = d`` or ``a - b = r ~ t = d``;
* ``a`` and ``b`` are two different digits of the puzzle, so no digit is used twice;
* the sum or difference ``r`` is correct and equals the puzzle's target, ``t`` repeats that target, and ``d`` is 0.

A response that gives up, makes a false claim, runs out of tokens or leaves the grammar scores 0.
"""

import hashlib
import itertools
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollmesh.config.data import CountdownSource
from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.sources.rows import FinitePrompts
from rollmesh.tasks.sources.source_protocol import SourceRows, SourceSettings, Split
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts
from rollmesh.types import Prompt

SMALLEST_DIGIT = 1
LARGEST_DIGIT = 9
EPOCH_SIZE = 1 << 20
_HELD_OUT_ONE_IN = 8
_FEWEST_SOLUTIONS = 2
_TRIAL = re.compile(
    r"\s*(?P<first>[0-9]{1,4})\s+(?P<sign>[+-])\s+(?P<second>[0-9]{1,4})\s+=\s+(?P<result>[0-9]{1,4})"
    r"\s+~\s+(?P<target>[0-9]{1,4})\s+=\s+(?P<difference>[0-9]{1,4})\s*!\s*"
)
_LONGEST_TRIAL_CHARACTERS = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Puzzle:
    """Distinct digits in the order of the prompt, and a target that at least one pair of them reaches."""

    numbers: tuple[int, ...]
    target: int

    @property
    def text(self) -> str:
        return f"{' '.join(map(str, self.numbers))} > {self.target} :"

    @property
    def solution_count(self) -> int:
        """Number of pairs and signs that reach the target; sums count once, differences with the larger digit first."""
        pairs = itertools.combinations(self.numbers, 2)
        return sum((a + b == self.target) + (abs(a - b) == self.target) for a, b in pairs)

    @property
    def held_out(self) -> bool:
        """True if the puzzle belongs to the eval split, which holds one in eight (set of digits, target).

        The order of the digits is ignored, except for puzzles of all nine digits: they are a single set.
        """
        digits = list(self.numbers) if len(self.numbers) == LARGEST_DIGIT else sorted(self.numbers)
        name = f"{digits}>{self.target}".encode()
        return hashlib.blake2b(name, digest_size=8).digest()[0] % _HELD_OUT_ONE_IN == 0


def draw_puzzle(rng: random.Random, split: Split, min_numbers: int, max_numbers: int) -> Puzzle:
    """Draw a puzzle of one split; a random pair and sign give the target, and a second solution must reach it.

    A single solution among the 56 pairs and signs of eight digits would reward luck. Two digits have only one pair.
    """
    while True:
        count = min_numbers + _below(rng, max_numbers - min_numbers + 1)
        digits = _shuffled(rng, range(SMALLEST_DIGIT, LARGEST_DIGIT + 1))[:count]
        low, high = sorted(_shuffled(rng, digits)[:2])
        target = low + high if rng.random() < 0.5 else high - low
        puzzle = Puzzle(numbers=tuple(digits), target=target)
        if puzzle.solution_count >= min(_FEWEST_SOLUTIONS, count - 1) and puzzle.held_out == (split == "eval"):
            return puzzle


class CountdownPrompts(FinitePrompts):
    """Deterministic random access to countdown prompts: equal (seed, split, epoch, index) give equal prompts.

    The splits share no (set of digits, target), so no evaluation puzzle is trained on, for any pair of seeds.
    ``metadata`` carries the fields of the verifier: ``{"numbers": [...], "target": t}``.
    """

    def __init__(self, source: CountdownSource, settings: SourceSettings) -> None:
        """Create a source. Raises ConfigError for impossible sizes."""
        low, high = source.min_numbers, source.max_numbers
        if not 2 <= low <= high <= LARGEST_DIGIT:
            raise ConfigError(
                f"data.source: min_numbers={low}, max_numbers={high}: "
                f"need 2 <= min_numbers <= max_numbers <= {LARGEST_DIGIT}"
            )
        self._settings = settings
        self._sizes = (low, high)
        self._key = f"countdown:{settings.split}:{settings.seed}"
        self._puzzles = source.puzzles if settings.split == "train" else None
        # Every epoch has new prompts, unless their number is given.
        shuffle = settings.shuffle and self._puzzles is not None
        super().__init__("countdown", self._puzzles or EPOCH_SIZE, settings.seed, shuffle=shuffle)

    @property
    def content(self) -> str:
        return ""

    def puzzle(self, epoch: int, index: int) -> Puzzle:
        digest = hashlib.blake2b(f"{self._key}:{epoch}:{index}".encode(), digest_size=16).digest()
        return draw_puzzle(random.Random(int.from_bytes(digest, "big")), self._settings.split, *self._sizes)

    def rows(self) -> SourceRows:
        if self._puzzles is None:
            return SourceRows(names=[self._key], domains=[""], endless=[True])
        names = [f"{self._key}:0:{row}" for row in range(self._puzzles)]
        return SourceRows(names=names, domains=[""] * self._puzzles, endless=[False] * self._puzzles)

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        if self._puzzles is not None:
            epoch, index = 0, row
        puzzle = self.puzzle(epoch, index)
        return Prompt(
            prompt_id=f"{self._key}:{epoch}:{index}",
            token_ids=self._settings.tokenizer.encode(puzzle.text),
            verifier="countdown",
            metadata={"numbers": list(puzzle.numbers), "target": puzzle.target},
        )


def _below(rng: random.Random, bound: int) -> int:
    # Python guarantees the same numbers in every release for Random.random() only.
    return int(rng.random() * bound)


def _shuffled(rng: random.Random, items: Sequence[int]) -> list[int]:
    pool = list(items)
    for last in range(len(pool) - 1, 0, -1):
        other = _below(rng, last + 1)
        pool[last], pool[other] = pool[other], pool[last]
    return pool


class CountdownVerifier:
    """Reward 1 for a response whose last trial is an exact, claimed solution, else 0.

    Parts: ``correct`` is the value; ``claimed`` is 1 if the response ends with ``!``. A false claim has ``claimed`` 1
    and ``correct`` 0.
    """

    timeout_means_wrong = True

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response. Raises VerifierError unless ``numbers`` and ``target`` are present and integers."""
        numbers, target = _puzzle_of(prompt_metadata)
        # Cut before matching, so that the cost does not grow with the length of the response.
        last = response[-_LONGEST_TRIAL_CHARACTERS:].rpartition(",")
        is_whole_trial = bool(last[1]) or len(response) <= _LONGEST_TRIAL_CHARACTERS
        match = _TRIAL.fullmatch(last[2]) if is_whole_trial else None
        correct = 0.0
        if match is not None:
            first, second, result = int(match["first"]), int(match["second"]), int(match["result"])
            is_used_once = first != second and first in numbers and second in numbers
            is_right = result == target == (first + second if match["sign"] == "+" else first - second)
            correct = float(
                is_used_once and is_right and int(match["target"]) == target and int(match["difference"]) == 0
            )
        claimed = float(last[2].rstrip().endswith("!"))
        return RewardParts(value=correct, parts={"correct": correct, "claimed": claimed})


def _puzzle_of(metadata: Mapping[str, Any]) -> tuple[frozenset[int], int]:
    numbers, target = metadata.get("numbers"), metadata.get("target")
    if not isinstance(target, int) or not isinstance(numbers, list | tuple) or not numbers:
        raise VerifierError(
            f"countdown: metadata needs numbers (a list) and target (an integer), got {dict(metadata)!r}"
        )
    if not all(isinstance(number, int) for number in numbers):
        raise VerifierError(f"countdown: numbers must be integers, got {numbers!r}")
    return frozenset(numbers), target
