"""Verifiers that wait for an external reply; they run concurrently in the service's asyncio loop."""

from __future__ import annotations

import asyncio

from rollmesh.config.reward import RewardConfig
from rollmesh.errors import DataError, VerifierError
from rollmesh.reward.answer_text import answer_text
from rollmesh.reward.outcomes import timed_out, verifier_error
from rollmesh.reward.pool.worker_process import prompt_metadata
from rollmesh.tasks.verifiers.verifier_protocol import AsyncVerifier, checked_reward
from rollmesh.tasks.verifiers.verifier_registry import BUILT_IN, build_verifier, built_in_class
from rollmesh.text import Tokenizer
from rollmesh.types import OutcomeKind, RewardOutcome
from rollmesh.wire.reward_messages import score_item_from_bytes


class Judge:
    """One asynchronous verifier with a limit on concurrent calls."""

    def __init__(self, reward: RewardConfig, verifier: AsyncVerifier, tokenizer: Tokenizer, marker: str | None) -> None:
        self._name = reward.verifier
        self._verifier = verifier
        self._tokenizer = tokenizer
        self._timeout_seconds = reward.timeout_seconds
        self._marker = marker
        self._slots = asyncio.Semaphore(verifier.concurrency)

    async def score(self, payload: bytes) -> RewardOutcome:
        """Score one encoded item; the time limit starts when the call starts, not while it waits for a slot."""
        try:
            item = score_item_from_bytes(payload)
            response = answer_text(item, self._tokenizer, self._marker, self._name)
            metadata = prompt_metadata(item.prompt, self._verifier, self._tokenizer)
            async with self._slots, asyncio.timeout(self._timeout_seconds):
                result = await self._verifier.verify_async(response, metadata)
            reward = checked_reward(result, self._name)
            outcome = RewardOutcome(kind=OutcomeKind.SCORED, value=reward.value, parts=reward.parts)
        except TimeoutError as error:
            message = str(error) or f"{self._name}: no reply within {self._timeout_seconds:g} s"
            return timed_out(message, self._verifier.timeout_means_wrong)
        except (DataError, VerifierError) as error:
            return verifier_error(str(error))
        except Exception as error:  # as in the process pool, any exception of a verifier becomes an outcome
            return verifier_error(f"{self._name}: {type(error).__name__}: {error}")
        return outcome

    async def aclose(self) -> None:
        """Close the verifier's connections."""
        await self._verifier.aclose()


def is_judge(name: str) -> bool:
    """Return True for a built-in verifier that waits for an external reply."""
    return name in BUILT_IN and hasattr(built_in_class(name), "verify_async")


def build_judge(reward: RewardConfig, tokenizer: Tokenizer, marker: str | None) -> Judge | None:
    """Build the judge of a run, or return None if its verifier is synchronous and runs in the pool.

    Only built-in verifiers run here: user code runs only in the confined processes.
    """
    if not is_judge(reward.verifier):
        return None
    verifier = build_verifier(reward.verifier, reward.options)
    assert isinstance(verifier, AsyncVerifier)
    return Judge(reward, verifier, tokenizer, marker)
