"""Verifier of multiple-choice answers, which are letters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import TAIL_CHARACTERS, last_boxed, last_match, last_tag, reference_text

_NO_WORD = r"(?!I[ \t]+[a-z])(?!(?<![a-z][ \t])A[ \t]+(?!(?:is|was|as|and|or|but|because|since)\b)[a-z])"
"""Excludes the pronoun I, a letter I before a word, and the article A, which begins a sentence and precedes a noun."""
_OPENING = r"""(?:[\s*_$"'\u201c\u2018(\[{:]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf|boxed)\{)*"""
"""Marks of Markdown, TeX and quotations before a letter."""


class ChoiceVerifier:
    r"""Reward 1 if the chosen letter is the reference, else 0.

    The search order is ``<answer>...</answer>``, ``\boxed{...}``, the end of the response. In a marked answer a label
    at its beginning (``B.``, ``(B)``) counts first, then the last "answer is X" or "answer: X", then the last separate
    letter. Marks of Markdown and TeX, quotation marks, "option" and "choice" may precede X. The pronoun I and the
    article A at the beginning of a sentence are not choices. The reference is a letter, or an index from 0.
    """

    timeout_means_wrong = False

    def __init__(self, letters: str = "ABCDEFGHIJ") -> None:
        """Create a verifier; ``letters`` are the choices, in order. Raises ConfigError if they are invalid."""
        if not letters.isalpha() or not letters.isupper() or len(set(letters)) != len(letters):
            raise ConfigError(f"reward.options.letters: {letters!r} must be distinct capital letters")
        self._letters = letters
        alone = f"{_NO_WORD}([{letters}])(?![A-Za-z0-9]|['\u2019][A-Za-z])"
        self._label = re.compile(rf"{_OPENING}([{letters}])\s*(?:[]).,:;*}}\n]|$)")
        self._phrase = re.compile(
            rf"(?i:answer[*_ \t\r]*(?:is\b|:|\n)){_OPENING}(?:(?i:option|choice){_OPENING})?{alone}"
        )
        self._alone = re.compile(f"(?<![A-Za-z0-9'\u2019]){alone}")

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``. Raises VerifierError if ``answer`` is not a choice."""
        expected = self._reference(prompt_metadata)
        return float(self._chosen(response) == expected)

    def _reference(self, metadata: Mapping[str, Any]) -> str:
        if "answer" not in metadata:
            raise VerifierError(f"choice: the prompt's metadata has no field 'answer'; it has {sorted(metadata)}")
        text = reference_text(metadata["answer"], "choice").strip().strip("().").upper()
        if text.isascii() and text.isdigit() and int(text) < len(self._letters):
            return self._letters[int(text)]
        if len(text) == 1 and text in self._letters:
            return text
        raise VerifierError(
            f"choice: the prompt's answer {text[:40]!r} is not one of {self._letters}, and not an index"
        )

    def _chosen(self, response: str) -> str | None:
        for marked in (last_tag(response, "answer"), last_boxed(response)):
            if marked is not None:
                label = self._label.match(marked)
                return label[1] if label is not None else self._last_letter(marked)
        return self._last_letter(response[-TAIL_CHARACTERS:])

    def _last_letter(self, text: str) -> str | None:
        for pattern in (self._phrase, self._alone):
            if (found := last_match(pattern, text)) is not None:
                return found[1]
        return None
