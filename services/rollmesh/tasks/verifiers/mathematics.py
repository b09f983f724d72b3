"""Mathematical equality of an answer and its reference, by math-verify and sympy (extra: reward)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import last_boxed, references

TAIL_CHARACTERS = 4_000
"""An answer stands at the end: only so much of a response is parsed."""

DEEPEST_NESTING = 32
"""Brackets nested deeper are no answer; the parser's time grows exponentially with them."""

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


class MathVerifier:
    """1 when the last answer of a response equals a reference as mathematics, else 0.

    The content of the last ``\\boxed{...}`` counts; without one, the last formula or number. Equal text and unequal
    whole numbers are decided without sympy. An answer that sympy cannot decide in time is wrong, not lost.
    """

    timeout_means_wrong = True

    def __init__(self, float_rounding: int = 6, strict: bool = True) -> None:
        """``float_rounding``: decimals that are compared; ``strict``: sets are not tuples, variables have names.

        Raises ConfigError without the extra.
        """
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError("verifier math needs its packages: pip install 'rollmesh[reward]'") from error
        # It warns on every call that its own alarm is off; the killing pool is the alarm here.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        parse = partial(math_verify.parse, parsing_timeout=None)
        equal = partial(math_verify.verify, float_rounding=float_rounding, strict=strict, timeout_seconds=None)
        self._parse: Callable[[str], list[Any]] = lru_cache(maxsize=4096)(parse)
        self._equal: Callable[[list[Any], list[Any]], bool] = equal
        # The first call compiles its patterns: let that happen before any answer is on the clock.
        self._equal(self._parse("$1$"), self._parse("\\boxed{2}"))

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``; raises VerifierError when sympy cannot read that."""
        accepted = [text.strip() for text in references(prompt_metadata, "math")]
        boxed = last_boxed(response)
        answer = boxed if boxed is not None else response[-TAIL_CHARACTERS:].strip()
        if len(answer) > TAIL_CHARACTERS or _nesting(answer) > DEEPEST_NESTING:
            return 0.0
        return float(any(self._matches(reference, answer, boxed is not None) for reference in accepted))

    def _matches(self, reference: str, answer: str, boxed: bool) -> bool:
        if answer == reference:
            return True
        if _is_whole(reference) and _is_whole(answer):
            return int(reference) == int(answer)
        gold = self._parse(reference if any(d in reference for d in _DELIMITERS) else f"${reference}$")
        if not gold:
            raise VerifierError(f"math: the prompt's answer {reference[:80]!r} is no mathematics that sympy can read")
        return bool(self._equal(gold, self._parse(f"\\boxed{{{answer}}}" if boxed else answer)))


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
