"""Verifier of numbers, with a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import last_number, make_extractor, references

_NEAR_ZERO = Fraction(1, 10**9)


class NumericVerifier:
    """Reward 1 if the extracted number is within ``tolerance`` of a reference, else 0.

    The condition is ``|a - b| <= max(tolerance * max(|a|, |b|), absolute_tolerance)``, computed exactly, so that long
    integers are distinguished. Without ``absolute_tolerance`` it is 1e-9 for a reference 0, and 0 for all others. The
    last number of a reference text counts, so it may carry a rationale (``... #### 42``).
    """

    timeout_means_wrong = False

    def __init__(
        self, extract: str = "last_number", tolerance: float = 1e-6, absolute_tolerance: float | None = None
    ) -> None:
        """Create a verifier; the last number in the text that ``extract`` finds counts (``make_extractor``)."""
        for name, value in (("tolerance", tolerance), ("absolute_tolerance", absolute_tolerance)):
            if value is not None and not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"reward.options.{name}: {value} is not a finite number >= 0")
        self._extract = make_extractor(extract)
        self._relative = Fraction(tolerance)
        self._absolute = None if absolute_tolerance is None else Fraction(absolute_tolerance)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``. Raises VerifierError if ``answer`` contains no number."""
        accepted = [_reference(text) for text in references(prompt_metadata, "numeric")]
        found = self._extract(response)
        answer = _number(found) if found is not None else None
        return float(answer is not None and any(self._close(answer, reference) for reference in accepted))

    def _close(self, answer: Fraction, reference: Fraction) -> bool:
        absolute = self._absolute
        if absolute is None:
            absolute = Fraction(0) if reference else _NEAR_ZERO
        return abs(answer - reference) <= max(self._relative * max(abs(answer), abs(reference)), absolute)


def _reference(text: str) -> Fraction:
    number = _number(text)
    if number is None:
        raise VerifierError(f"numeric: the prompt's answer contains no number: {text[:80]!r}")
    return number


def _number(text: str) -> Fraction | None:
    found = last_number(text)
    if found is None:
        return None
    numerator, slash, denominator = found.replace(",", "").replace(" ", "").partition("/")
    return Fraction(numerator) / (Fraction(denominator) if slash else 1)
