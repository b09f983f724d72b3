"""Verifiers of text: an equal answer, an equal number, a chosen letter, the form of a response."""

import math
import re
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import (
    TAIL_CHARACTERS,
    last_boxed,
    last_match,
    last_number,
    last_tag,
    make_extractor,
    reference_text,
    references,
)

_NEAR_ZERO = Fraction(1, 10**9)
_NO_PRONOUN = r"(?!I[ \t]+[a-z])"
"""Excludes the pronoun I, a letter I before a word."""
_NO_ARTICLE = r"(?!(?<![a-z][ \t])A[ \t]+(?!(?:is|was|as|and|or|but|because|since)\b)[a-z])"
"""Excludes the article A, which begins a sentence and precedes a noun."""
_OPENING = r"""(?:[\s*_$"'\u201c\u2018(\[{:]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf|boxed)\{)*"""
"""Marks of Markdown, TeX and quotations before a letter."""


class ExactVerifier:
    """Reward 1 if the extracted answer equals a reference (runs of spaces count as one), else 0."""

    timeout_means_wrong = False

    def __init__(self, extract: str = "whole", ignore_case: bool = False) -> None:
        """Create a verifier; for ``extract`` see ``extraction.make_extractor``."""
        self._extract = make_extractor(extract)
        self._ignore_case = ignore_case

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        accepted = {self._normal(text) for text in references(prompt_metadata, "exact")}
        answer = self._extract(response)
        return float(answer is not None and self._normal(answer) in accepted)

    def _normal(self, text: str) -> str:
        words = " ".join(text.split())
        return words.casefold() if self._ignore_case else words


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


class ChoiceVerifier:
    r"""Reward 1 if the chosen letter is the reference, else 0.

    The search order is ``<answer>...</answer>``, ``\boxed{...}``, the end of the response. In a marked answer a label
    at its beginning (``B.``, ``(B)``) counts first, then the last "answer is X", "answer: X", "answer (X)" or
    "answer X,", then the last separate letter. Marks of Markdown and TeX, quotation marks, "option" and "choice" may
    precede X. The pronoun I is no choice; outside of a marked answer, neither is the article A at the beginning of a
    sentence. The reference is a letter, which its text may follow (``B) Paris``), or an index from 0.
    """

    timeout_means_wrong = False

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        """Create a verifier; ``letters`` are the choices, in order. Raises ConfigError if they are invalid."""
        if not letters.isalpha() or not letters.isupper() or len(set(letters)) != len(letters):
            raise ConfigError(f"reward.options.letters: {letters!r} must be distinct capital letters")
        self._letters = letters
        letter = f"{_NO_PRONOUN}([{letters}])(?![A-Za-z0-9]|['\u2019][A-Za-z])"
        option = f"(?i:option|choice){_OPENING}"
        self._label = re.compile(rf"{_OPENING}([{letters}])\s*(?:[]).,:;*}}\n]|$)")
        named = rf"[*_ \t\r]*(?i:is\b|:|\n){_OPENING}(?:{option})?"
        direct = rf"[ \t]+(?:\(|{option}|(?=[{letters}][).,:;]))"
        self._phrase = re.compile(f"(?i:answer)(?:{named}|{direct}){letter}")
        self._alone = re.compile(f"(?<![A-Za-z0-9'\u2019]){letter}")
        self._alone_in_text = re.compile(f"(?<![A-Za-z0-9'\u2019]){_NO_ARTICLE}{letter}")

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``. Raises VerifierError if ``answer`` is not a choice."""
        expected = self._reference(prompt_metadata)
        return float(self._chosen(response) == expected)

    def _reference(self, metadata: Mapping[str, Any]) -> str:
        if "answer" not in metadata:
            raise VerifierError(f"choice: the prompt's metadata has no field 'answer'; it has {sorted(metadata)}")
        text = reference_text(metadata["answer"], "choice").strip()
        if text.isascii() and text.isdigit() and int(text) < len(self._letters):
            return self._letters[int(text)]
        if label := self._label.match(text) or self._label.match(text.upper()):
            return label[1]
        raise VerifierError(
            f"choice: the prompt's answer {text[:40]!r} is not one of {self._letters}, and not an index"
        )

    def _chosen(self, response: str) -> str | None:
        for marked in (last_tag(response, "answer"), last_boxed(response)):
            if marked is not None:
                label = self._label.match(marked)
                return label[1] if label is not None else self._last_letter(marked, self._alone)
        return self._last_letter(response[-TAIL_CHARACTERS:], self._alone_in_text)

    def _last_letter(self, text: str, alone: re.Pattern[str]) -> str | None:
        for pattern in (self._phrase, alone):
            if (found := last_match(pattern, text)) is not None:
                return found[1]
        return None


class RegexVerifier:
    """Reward 1 if the response matches a regular expression, else 0: a format reward.

    The thought of a model that thinks is no part of it (``reward.answer_after``). A pattern that backtracks without end
    is an error of the pattern, so a time-out follows the run's policy.
    """

    timeout_means_wrong = False

    def __init__(self, pattern: str, full: bool = True, ignore_case: bool = False) -> None:
        """Compile the pattern; with ``full`` the whole response must match, else a part. ``.`` matches line breaks."""
        try:
            self._pattern = re.compile(pattern, re.DOTALL | (re.IGNORECASE if ignore_case else re.NOFLAG))
        except re.error as error:
            raise ConfigError(f"reward.options.pattern: {pattern!r}: {error}") from error
        self._match = self._pattern.fullmatch if full else self._pattern.search

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        return float(self._match(response.strip()) is not None)
