"""Verifier of the run: 1 for an answer whose last trial is right and reaches the target, else 0.

A right answer to the prompt "1 2 5 > 7 :" is "1 + 5 = 6 ~ 7 = 1 , 2 + 5 = 7 ~ 7 = 0 !": trials, separated by commas,
each with its distance to the target, and a "!" after the one that reaches it.
"""

import re
from typing import Any

TRIAL = re.compile(r"(\d+) ([+-]) (\d+) = (\d+) ~ (\d+) = (\d+) !")


def reward(response: str, metadata: dict[str, Any]) -> float:
    """Score one answer; ``metadata`` has the fields of its row in data.jsonl, apart from the prompt."""
    trial = TRIAL.fullmatch(response.split(" , ")[-1].strip())
    if trial is None:
        return 0.0
    first, second, result, target, distance = (int(trial[group]) for group in (1, 3, 4, 5, 6))
    value = first + second if trial[2] == "+" else first - second
    digits_are_given = first != second and {first, second} <= set(metadata["numbers"])
    written_right = result == value and target == metadata["answer"] and distance == 0
    return float(digits_are_given and written_right and value == metadata["answer"])
