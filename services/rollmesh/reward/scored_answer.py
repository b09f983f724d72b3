"""The score of one answer: the text that its verifier reads, the call of the verifier, and the outcome.

A ``RewardHandler`` does it in a confined worker process, or for a debugger in the service (``InlineVerifier``). A
``Judge`` waits for an external reply in the service's event loop.
"""

import asyncio
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from rollmesh.config.rollout import RewardConfig
from rollmesh.errors import DataError, VerifierError
from rollmesh.tasks.sources.derived import plain_text_of
from rollmesh.tasks.verifiers.extraction import OPENING_TAG, answer_after, without_own_thought
from rollmesh.tasks.verifiers.verifier_protocol import (
    BUILT_IN,
    AsyncVerifier,
    Verifier,
    checked_reward,
    reads_answers,
)
from rollmesh.text import Tokenizer
from rollmesh.types import OutcomeKind, Prompt, RewardOutcome
from rollmesh.user_code import described
from rollmesh.wire.reward_messages import ScoreItem, outcome_from_bytes, outcome_to_bytes, score_item_from_bytes

_LONGEST_MESSAGE = 500


class RewardHandler:
    """Scorer of one answer at a time, with the verifiers loaded before the process was confined."""

    def __init__(
        self, tokenizer: Tokenizer, verifiers: Mapping[str, Verifier], default: str, marker: str | None = ""
    ) -> None:
        """``default`` is the verifier of prompts without a verifier; answers follow ``marker`` (``answer_text``)."""
        self._tokenizer = tokenizer
        self._verifiers = verifiers
        self._default = default
        self._marker = marker
        self.needs_replacement = False
        """True if the process must be replaced because it ran out of memory."""

    def __call__(self, payload: bytes) -> bytes:
        """Score one encoded item; never raises."""
        try:
            outcome = self._score(score_item_from_bytes(payload))
        except DataError as error:
            outcome = verifier_error(str(error))
        except MemoryError:
            self.needs_replacement = True
            outcome = verifier_error("MemoryError: the verifier process exceeded reward.memory_limit_bytes")
        return outcome_to_bytes(outcome)

    def _score(self, item: ScoreItem) -> RewardOutcome:
        name = item.prompt.verifier or self._default
        verifier = self._verifiers.get(name)
        if verifier is None:
            return verifier_error(f"this run has no verifier {name!r}; it has {', '.join(sorted(self._verifiers))}")
        response = answer_text(item, self._tokenizer, self._marker, name)
        metadata = prompt_metadata(item.prompt, verifier, self._tokenizer)
        try:
            return _scored(verifier.verify(response, metadata), name)
        except MemoryError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            return _failed(error, name, verifier, "the verifier's time limit expired")


class InlineVerifier:
    """Scorer of one answer at a time in a thread of the service, without a time limit."""

    def __init__(self, handler: RewardHandler) -> None:
        self._handler = handler
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="verifier")

    async def score(self, payload: bytes) -> RewardOutcome:
        answer = asyncio.get_running_loop().run_in_executor(self._thread, self._handler, payload)
        return outcome_from_bytes(await answer)

    async def aclose(self) -> None:
        """Drop waiting answers; the answer in progress ends in its thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)


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
            return _scored(result, self._name)
        except Exception as error:
            return _failed(error, self._name, self._verifier, f"no reply within {self._timeout_seconds:g} s")

    async def aclose(self) -> None:
        await self._verifier.aclose()


def is_judge(name: str) -> bool:
    """Return True for a built-in verifier that waits for an external reply; user code runs in confined processes."""
    return name in BUILT_IN and BUILT_IN[name].is_judge


def answer_marker(tokenizer: Tokenizer, given: str | None, template_variables: Mapping[str, Any]) -> str | None:
    """Return ``reward.answer_after``, or without it the end of the thought that the chat template opens.

    None if it opens none: a response may then still begin with a thought of its own.
    """
    if given is not None:
        return given
    try:
        prompt = tokenizer.chat_text([{"role": "user", "content": "1"}], variables=template_variables)
    except DataError:  # no template, or one that needs other messages
        return None
    opened = re.search(rf"{OPENING_TAG.pattern}\s*$", prompt, OPENING_TAG.flags)
    return f"{opened[1]}/{opened[2]}" if opened is not None else None


def answer_text(item: ScoreItem, tokenizer: Tokenizer, marker: str | None, verifier: str) -> str:
    """Return the part of a response that a verifier reads, without special tokens.

    It is what follows ``marker``, and all of the response for an empty one. For None it is what follows the thought
    with which the response begins, for a verifier that reads answers.
    """
    if marker == "" or (marker is None and not reads_answers(verifier)):
        return tokenizer.decode(item.response_ids)
    # Tags are special tokens of some tokenizers.
    response = tokenizer.decode(item.response_ids, special_tokens=True)
    if marker is None:
        return tokenizer.without_special_tokens(without_own_thought(response))
    prompt = tokenizer.decode(item.prompt.token_ids, special_tokens=True)
    return tokenizer.without_special_tokens(answer_after(response, marker, prompt))


def prompt_metadata(prompt: Prompt, verifier: Verifier, tokenizer: Tokenizer) -> Mapping[str, Any]:
    """Return the prompt's metadata, with the prompt's text if the verifier requires it."""
    if not getattr(verifier, "needs_prompt", False):
        return prompt.metadata
    return {**prompt.metadata, "prompt": plain_text_of(prompt, tokenizer)}


def timed_out(message: str, means_wrong: bool) -> RewardOutcome:
    """Build the outcome of a time-out.

    If the verifier declares that a time-out means a wrong answer, the answer is scored 0 and marked by the part
    ``timed_out``. Otherwise the outcome has no value and ``reward.on_error`` of the run applies.
    """
    if means_wrong:
        return RewardOutcome(kind=OutcomeKind.SCORED, value=0.0, parts={"timed_out": 1.0}, message=_clean(message))
    return RewardOutcome(kind=OutcomeKind.TIMED_OUT, message=_clean(message))


def verifier_error(message: str) -> RewardOutcome:
    """Build the outcome of a verifier that failed or returned a value that is not a number."""
    return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=_clean(message))


def _scored(result: object, name: str) -> RewardOutcome:
    reward = checked_reward(result, name)
    return RewardOutcome(kind=OutcomeKind.SCORED, value=reward.value, parts=reward.parts)


def _failed(error: BaseException, name: str, verifier: Verifier, late: str) -> RewardOutcome:
    """Return the outcome of an error: any exception of a verifier becomes one, never a silent 0."""
    if isinstance(error, TimeoutError):
        return timed_out(str(error) or f"{name}: {late}", verifier.timeout_means_wrong)
    is_worded = isinstance(error, VerifierError | DataError)
    return verifier_error(str(error) if is_worded else f"{name}: {described(error)}")


def _clean(message: str) -> str:
    """Shorten a message and replace characters that cannot be encoded: messages quote answers."""
    return message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()
