"""Verifier of mathematical equality with a reference, by math-verify and sympy (extra: reward)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import last_boxed, references

TAIL_CHARACTERS = 4_000
"""Parsed length of a response, from its end, where the answer is."""

DEEPEST_NESTING = 32
"""Limit of nested brackets in an answer; the time of the parser grows exponentially with them."""

_DELIMITERS = ("$", "\\(", "\\[", "\\boxed")


class MathVerifier:
    r"""Reward 1 if the last answer of a response is mathematically equal to a reference, else 0.

    The content of the last ``\boxed{...}`` counts; without one, the last formula or number. Equal text and unequal
    whole numbers are decided without sympy. An answer that sympy cannot decide in time is wrong, not unscorable.
    """

    timeout_means_wrong = True

    def __init__(self, float_rounding: int = 6, strict: bool = True) -> None:
        """Create a verifier. Raises ConfigError without the extra.

        ``float_rounding``: number of compared decimals. ``strict``: sets do not equal tuples, and the names of
        variables count.
        """
        try:
            import math_verify
        except ImportError as error:
            raise ConfigError("verifier math needs its packages: pip install 'rollmesh[reward]'") from error
        # The package warns on every call that its time-out is off; the process pool enforces the time-out instead.
        logging.getLogger("math_verify").setLevel(logging.ERROR)
        parse = partial(math_verify.parse, parsing_timeout=None)
        equal = partial(math_verify.verify, float_rounding=float_rounding, strict=strict, timeout_seconds=None)
        self._parse: Callable[[str], list[Any]] = lru_cache(maxsize=4096)(parse)
        self._equal: Callable[[list[Any], list[Any]], bool] = equal
        # The first call compiles the patterns; do it here, outside the time limit of an answer.
        self._equal(self._parse("$1$"), self._parse("\\boxed{2}"))

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``. Raises VerifierError if sympy cannot read ``answer``."""
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
            raise VerifierError(f"math: the prompt's answer {reference[:80]!r} is not mathematics that sympy can read")
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
