"""The answer is the reference number, within a tolerance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import last_number, make_extractor, references


class NumericVerifier:
    """1 when the extracted number is within ``tolerance`` of a reference, else 0.

    Close means ``|a - b| <= max(tolerance * max(|a|, |b|), absolute_tolerance)``, computed exactly, so that long
    integers are told apart. A reference text may carry a rationale: its last number counts (``... #### 42``).
    """

    timeout_means_wrong = False

    def __init__(self, extract: str = "last_number", tolerance: float = 1e-6, absolute_tolerance: float = 1e-9) -> None:
        """``extract``: see ``extraction.make_extractor``; the number is the last one in what it finds."""
        for name, value in (("tolerance", tolerance), ("absolute_tolerance", absolute_tolerance)):
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError(f"reward.options.{name}: {value} is not a finite number >= 0")
        self._extract = make_extractor(extract)
        self._relative = Fraction(tolerance)
        self._absolute = Fraction(absolute_tolerance)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``; raises VerifierError when that holds no number."""
        accepted = [_reference(text) for text in references(prompt_metadata, "numeric")]
        found = self._extract(response)
        answer = _number(found) if found is not None else None
        return float(answer is not None and any(self._close(answer, other) for other in accepted))

    def _close(self, a: Fraction, b: Fraction) -> bool:
        return abs(a - b) <= max(self._relative * max(abs(a), abs(b)), self._absolute)


def _reference(text: str) -> Fraction:
    number = _number(text)
    if number is None:
        raise VerifierError(f"numeric: the prompt's answer holds no number: {text[:80]!r}")
    return number


def _number(text: str) -> Fraction | None:
    found = last_number(text)
    if found is None:
        return None
    numerator, slash, denominator = found.replace(",", "").replace(" ", "").partition("/")
    return Fraction(numerator) / (Fraction(denominator) if slash else 1)
