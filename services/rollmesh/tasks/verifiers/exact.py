"""Verifier of answers that must equal a reference character by character."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.tasks.verifiers.extraction import make_extractor, references


class ExactVerifier:
    """Reward 1 if the extracted answer equals a reference (runs of spaces count as one), else 0."""

    timeout_means_wrong = False

    def __init__(self, extract: str = "whole", ignore_case: bool = False) -> None:
        """Create a verifier; for ``extract`` see ``extraction.make_extractor``."""
        self._extract = make_extractor(extract)
        self._ignore_case = ignore_case

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response against ``answer``."""
        accepted = {self._normal(text) for text in references(prompt_metadata, "exact")}
        answer = self._extract(response)
        return float(answer is not None and self._normal(answer) in accepted)

    def _normal(self, text: str) -> str:
        words = " ".join(text.split())
        return words.casefold() if self._ignore_case else words
