"""Verifier of mathematical equality with a reference, by math-verify and sympy (extra: reward)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import last_boxed, references

TAIL_CHARACTERS = 4_000
"""Parsed length of a response, from its end, where the answer is."""

DEEPEST_NESTING = 32
"""Limit of nested brackets in an answer; the time of the parser grows exponentially with them."""

_DELIMITED = re.compile(r"(?<!\\)\$.*(?<!\\)\$|(?<!\\)\\\(.*\\\)|(?<!\\)\\\[.*\\\]", re.DOTALL)
"""Formula within a text; the ``$`` of a price, ``\\$5``, delimits none."""


class MathVerifier:
    r"""Reward 1 if the last answer of a response is mathematically equal to a reference, else 0.

    The content of the last ``\boxed{...}`` counts; without one, the last formula or number. Whole numbers are compared
    without sympy. Bases count where both have one (``2010_7`` and ``2010_8`` differ); an equation of different numbers
    (``5=7``) is wrong. An answer that sympy cannot decide in time is wrong, not unscorable.
    """

    timeout_means_wrong = True

    def __init__(self, float_rounding: int = 6, strict: bool = True) -> None:
        """Create a verifier. Raises ConfigError without the extra.

        ``float_rounding``: number of compared decimals, for numbers below 0.1 from their first digit that is not 0.
        ``strict``: sets do not equal tuples, and the names of variables count.
        """
        try:
            # It needs the extra, and its import takes a second, so that only users of this verifier pay for it.
            from rollmesh.tasks.verifiers import math_equality
        except ImportError as error:
            raise ConfigError("verifier math needs its packages: pip install 'rollmesh[reward]'") from error
        self._mathematics = math_equality
        self._equal = partial(math_equality.equal, float_rounding=float_rounding, strict=strict)
        # The first call compiles the patterns; do it here, outside the time limit of an answer.
        self._equal(math_equality.read("$1$", boxed=False), math_equality.read("2", boxed=True))

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``. Raises VerifierError if sympy cannot read ``answer``."""
        accepted = [text.strip() for text in references(prompt_metadata, "math")]
        boxed = last_boxed(response)
        answer = boxed if boxed is not None else response[-TAIL_CHARACTERS:].strip()
        if len(answer) > TAIL_CHARACTERS or _nesting(answer) > DEEPEST_NESTING:
            return 0.0
        return float(any(self._matches(reference, answer, boxed is not None) for reference in accepted))

    def _matches(self, reference: str, answer: str, boxed: bool) -> bool:
        if _is_whole(reference) and _is_whole(answer):
            return int(reference) == int(answer)
        text, alone = _formula(reference)
        meanings = list(self._mathematics.readings(text, boxed=alone))
        if not meanings[0].found:
            raise VerifierError(f"math: the prompt's answer {reference[:80]!r} is not mathematics that sympy can read")
        if answer == reference:
            return True
        given = list(self._mathematics.readings(answer, boxed=boxed))
        return any(self._equal(gold, meant) for gold in meanings for meant in given)


def _formula(reference: str) -> tuple[str, bool]:
    """Return the mathematics of a reference, and False if a formula within text has to be found first."""
    if (boxed := last_boxed(reference)) is not None:
        return boxed, True
    return reference, _DELIMITED.search(reference) is None


def _is_whole(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and len(digits) <= 400


def _nesting(text: str) -> int:
    depth = deepest = 0
    for character in text:
        if character in "([{":
            depth += 1
            deepest = max(deepest, depth)
        elif character in ")]}":
            depth = max(0, depth - 1)
    return deepest
