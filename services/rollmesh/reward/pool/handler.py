"""Inside a worker process: bytes of an answer in, bytes of a typed outcome out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmesh.errors import DataError, VerifierError
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.tasks.verifiers.verifier_protocol import Verifier, checked_reward
from rollmesh.text import Tokenizer
from rollmesh.types import OutcomeKind, Prompt, RewardOutcome
from rollmesh.wire.reward_messages import ScoreItem, outcome_to_bytes, score_item_from_bytes


class RewardHandler:
    """Scores one answer at a time with the verifiers that were loaded before the process was confined."""

    def __init__(self, tokenizer: Tokenizer, verifiers: Mapping[str, Verifier], default: str) -> None:
        """``default`` is the verifier of prompts that name none."""
        self._tokenizer = tokenizer
        self._verifiers = verifiers
        self._default = default
        self.worn_out = False
        """Whether the process should be replaced: it ran out of memory once."""

    def __call__(self, payload: bytes) -> bytes:
        """Score one encoded item; never raises."""
        try:
            return outcome_to_bytes(self._score(score_item_from_bytes(payload)))
        except DataError as error:
            return outcome_to_bytes(verifier_error(str(error)))
        except MemoryError:
            self.worn_out = True
            return outcome_to_bytes(verifier_error("MemoryError: over the memory limit of a verifier process"))
        except ValueError as error:  # a part's name that is no text protobuf can hold
            return outcome_to_bytes(verifier_error(f"the reward cannot be encoded: {error}"))

    def _score(self, item: ScoreItem) -> RewardOutcome:
        name = item.prompt.verifier or self._default
        verifier = self._verifiers.get(name)
        if verifier is None:
            return verifier_error(f"this run has no verifier {name!r}; it has {', '.join(sorted(self._verifiers))}")
        response = self._tokenizer.decode(item.response_ids)
        metadata = prompt_metadata(item.prompt, verifier, self._tokenizer)
        try:
            reward = checked_reward(verifier.verify(response, metadata), name)
        except TimeoutError as error:
            return timed_out(str(error) or f"{name}: its own limit passed", verifier.timeout_means_wrong)
        except VerifierError as error:
            return verifier_error(str(error))
        except MemoryError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # whatever a verifier raises is its own outcome
            return verifier_error(f"{name}: {type(error).__name__}: {error}")
        return RewardOutcome(kind=OutcomeKind.SCORED, value=reward.value, parts=reward.parts)


def prompt_metadata(prompt: Prompt, verifier: Verifier, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """The metadata, with the prompt's text for a verifier that asks for it."""
    if not getattr(verifier, "needs_prompt", False):
        return prompt.metadata
    return {**prompt.metadata, "prompt": tokenizer.decode(prompt.token_ids)}
