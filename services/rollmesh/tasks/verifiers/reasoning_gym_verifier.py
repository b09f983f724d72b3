"""Verifier that scores an answer with the reasoning-gym task of its question (extra: reward)."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rollmesh.errors import ConfigError, DataError, VerifierError
from rollmesh.tasks.entries import entry_from_text
from rollmesh.tasks.verifiers.extraction import last_tag

LONGEST_ANSWER = 20_000
"""Limit in characters; a longer answer is cut to its end."""
_NOT_A_NUMBER = re.compile(r"(?<![a-z])nan[ij]?(?![a-z])", re.IGNORECASE)


class ReasoningGymVerifier:
    """Score by the task, usually 0 to 1, of ``<answer>...</answer>`` or, without the tag, of the whole response.

    An answer that the task cannot read scores 0.
    """

    timeout_means_wrong = True

    def __init__(self) -> None:
        """Import the package. Raises ConfigError without the extra."""
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError("verifier reasoning_gym needs its package: pip install 'rollmesh[reward]'") from error
        self._create = reasoning_gym.create_dataset
        self._task = lru_cache(maxsize=64)(self._make_task)

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float:
        """Score one response. Raises VerifierError if the metadata is not from the reasoning-gym source."""
        try:
            name, options, text = (str(prompt_metadata[field]) for field in ("task", "options", "entry"))
            entry = entry_from_text(text)
            task = self._task(name, options)
        except KeyError as error:
            raise VerifierError(f"reasoning_gym: the prompt's metadata has no field {error}") from error
        except (DataError, ValueError, TypeError, AssertionError) as error:
            raise VerifierError(f"reasoning_gym: the prompt's metadata names no task: {error}") from error
        answer = last_tag(response, "answer")
        answer = response.strip() if answer is None else answer
        answer = answer[-LONGEST_ANSWER:]
        if _NOT_A_NUMBER.search(answer) and not _NOT_A_NUMBER.search(str(entry.get("answer"))):
            return 0.0  # not-a-number passes every tolerance check of the library
        try:
            return float(task.score_answer(answer, entry))
        except Exception:
            # An answer that the task cannot read is wrong. A task that cannot score its reference answer is broken.
            task.score_answer(str(entry.get("answer")), entry)
            return 0.0

    def _make_task(self, name: str, options: str) -> Any:
        return self._create(name, size=1, seed=0, **json.loads(options))
