"""Verifier of the form of a response."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import ConfigError


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
        """Score one response; the metadata is not used."""
        return float(self._match(response.strip()) is not None)
