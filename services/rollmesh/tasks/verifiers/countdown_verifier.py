"""Exact check of a countdown response: only its last trial counts, and only if it claims success.

A response is correct if it meets all these conditions (the grammar is in ``rollmesh.tasks.sources.countdown``):

* it ends with ``!``;
* the words after the last ``,`` are exactly one trial, ``a + b = r ~ t = d`` or ``a - b = r ~ t = d``;
* ``a`` and ``b`` are two different digits of the puzzle, so no digit is used twice;
* the sum or difference ``r`` is correct and equals the puzzle's target, ``t`` repeats that target, and ``d`` is 0.

A response that gives up, makes a false claim, runs out of tokens or leaves the grammar scores 0.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import VerifierError
from rollmesh.tasks.verifiers.verifier_protocol import RewardParts

_TRIAL = re.compile(
    r"\s*(?P<first>[0-9]{1,4})\s+(?P<sign>[+-])\s+(?P<second>[0-9]{1,4})\s+=\s+(?P<result>[0-9]{1,4})"
    r"\s+~\s+(?P<target>[0-9]{1,4})\s+=\s+(?P<difference>[0-9]{1,4})\s*!\s*"
)
_LONGEST_TRIAL_CHARACTERS = 128


class CountdownVerifier:
    """Reward 1 for a response whose last trial is an exact, claimed solution, else 0.

    Parts: ``correct`` is the value; ``claimed`` is 1 if the response ends with ``!``. A false claim has ``claimed`` 1
    and ``correct`` 0.
    """

    timeout_means_wrong = True

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> RewardParts:
        """Score one response. Raises VerifierError unless ``numbers`` and ``target`` are present and integers."""
        numbers, target = _puzzle(prompt_metadata)
        # Cut before matching, so that the cost does not grow with the length of the response.
        last = response[-_LONGEST_TRIAL_CHARACTERS:].rpartition(",")
        is_whole_trial = bool(last[1]) or len(response) <= _LONGEST_TRIAL_CHARACTERS
        match = _TRIAL.fullmatch(last[2]) if is_whole_trial else None
        correct = float(match is not None and _hits(match, numbers, target))
        claimed = float(last[2].rstrip().endswith("!"))
        return RewardParts(value=correct, parts={"correct": correct, "claimed": claimed})


def _hits(trial: re.Match[str], numbers: frozenset[int], target: int) -> bool:
    first, second = int(trial["first"]), int(trial["second"])
    result = first + second if trial["sign"] == "+" else first - second
    digits_used_once = first != second and first in numbers and second in numbers
    written_right = int(trial["result"]) == result and int(trial["target"]) == target
    return digits_used_once and written_right and result == target and int(trial["difference"]) == 0


def _puzzle(metadata: Mapping[str, Any]) -> tuple[frozenset[int], int]:
    numbers, target = metadata.get("numbers"), metadata.get("target")
    if not isinstance(target, int) or not isinstance(numbers, list | tuple) or not numbers:
        raise VerifierError(
            f"countdown: metadata needs numbers (a list) and target (an integer), got {dict(metadata)!r}"
        )
    if not all(isinstance(number, int) for number in numbers):
        raise VerifierError(f"countdown: numbers must be integers, got {numbers!r}")
    return frozenset(numbers), target
