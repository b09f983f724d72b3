"""The protocol of a teacher's engines, and what every engine's scores must hold."""

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from rollmesh.errors import DataError, EngineError
from rollmesh.types import Float32Array, Int32Array

_LEAST_LOGPROB = -1e30
"""Smallest log-probability; SGLang returns the smallest float for minus infinity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequest:
    """One sequence to score."""

    token_ids: Int32Array  # [tokens], prompt and response
    prompt_token_count: int
    """Tokens of the prompt, at least one; those after it are scored."""
    temperature: float
    top_k: int
    """Number of most likely tokens to return per response token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """Scores of the response of one sequence."""

    logprobs: Float32Array  # [tokens], log_softmax(z/T)
    top_ids: Int32Array  # [tokens, top_k], most likely first
    top_logprobs: Float32Array  # [tokens, top_k]


class TeacherEngine(Protocol):
    """An engine that scores under frozen weights; ``failed`` gets the error that ends it."""

    failed: asyncio.Future[None]

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score a sequence. Raises DataError with the reason if it has no scores, EngineError if the engine failed."""
        ...


def check_request(request: ScoreRequest, *, vocab_size: int, context_tokens: int) -> None:
    """Raise DataError for a sequence that no engine can score."""
    ids, prompt = request.token_ids, request.prompt_token_count
    if len(ids) > context_tokens:
        raise DataError(f"token_ids: {len(ids)} tokens, the teacher's context has {context_tokens}")
    if not 1 <= prompt <= len(ids):
        raise DataError(f"prompt_token_count={prompt}: expected 1 to {len(ids)} (token_ids)")
    if foreign := np.flatnonzero((ids < 0) | (ids >= vocab_size)).tolist():
        raise DataError(
            f"token_ids[{foreign[0]}]={ids[foreign[0]]} is outside the teacher's vocabulary of {vocab_size} tokens"
        )


def check_scores(scores: TokenScores, request: ScoreRequest, policy_vocab_size: int) -> None:
    """Raise DataError unless there is one finite score per response token, and ``top_k`` of them."""
    count = len(request.token_ids) - request.prompt_token_count
    if len(scores.logprobs) != count:
        raise DataError(f"the engine returned {len(scores.logprobs)} log-probabilities for {count} response tokens")
    if scores.top_ids.shape != (count, request.top_k) or scores.top_logprobs.shape != scores.top_ids.shape:
        raise DataError(
            f"the engine returned the most likely tokens in the shape {list(scores.top_ids.shape)}, expected "
            f"{[count, request.top_k]}"
        )
    for name, values in (("logprobs", scores.logprobs), ("top_logprobs", scores.top_logprobs)):
        if not (np.isfinite(values) & (values > _LEAST_LOGPROB)).all():
            raise DataError(f"{name}: the teacher's log-probabilities are not finite")
    if scores.top_ids.size and not 0 <= scores.top_ids.min() <= scores.top_ids.max() < policy_vocab_size:
        raise DataError(f"top_ids: {scores.top_ids.max()} is outside the policy's vocabulary of {policy_vocab_size}")


def fail(failed: asyncio.Future[None], error: EngineError) -> None:
    """Report the error that ended an engine; the first one counts."""
    if not failed.done():
        failed.set_exception(error)
        failed.exception()  # no warning if nobody reads it before the end
