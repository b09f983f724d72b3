"""Verifier of multiple-choice answers, which are letters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import ConfigError, VerifierError
from rollmesh.tasks.verifiers.extraction import TAIL_CHARACTERS, last_boxed, last_match, last_tag, reference_text

_NO_PRONOUN = r"(?!I[ \t]+[a-z])"
"""Excludes the pronoun I, a letter I before a word."""
_NO_ARTICLE = r"(?!(?<![a-z][ \t])A[ \t]+(?!(?:is|was|as|and|or|but|because|since)\b)[a-z])"
"""Excludes the article A, which begins a sentence and precedes a noun."""
_OPENING = r"""(?:[\s*_$"'\u201c\u2018(\[{:]|\\[(\[]|\\(?:text|textbf|mathrm|mathbf|boxed)\{)*"""
"""Marks of Markdown, TeX and quotations before a letter."""


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
