"""Protocols of verifiers, and the rewards that they return."""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rollmesh.characters import half_character
from rollmesh.errors import VerifierError
from rollmesh.types import LARGEST_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """Reward with its named parts; the parts are for display, the value is trained on."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scorer of one response. It is stateless and may be slow: it runs in a process pool that kills at a time-out.

    An optional attribute ``needs_prompt = True`` adds the prompt's text to the metadata as ``prompt``.
    """

    timeout_means_wrong: bool
    """True if an answer that cannot be checked in time is wrong (value 0); False if the run's policy decides."""

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Return the reward of a response.

        Raises VerifierError if the metadata lacks a field; the run treats any other exception as a VerifierError too.
        Raises TimeoutError after the verifier's own time limit.
        """


@runtime_checkable
class AsyncVerifier(Verifier, Protocol):
    """Verifier that waits more than it computes, for example for an HTTP reply.

    Many of its calls run at once in the service's event loop, outside the process pool, so it must not block the loop.
    """

    concurrency: int
    """Maximum number of concurrent ``verify_async`` calls."""

    async def verify_async(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Return the reward of a response, like ``verify``; every call comes from one event loop."""

    async def aclose(self) -> None:
        """Close the connections."""


def checked_reward(result: object, verifier: str) -> RewardParts:
    """Return the result of a verifier as floats within ``LARGEST_REWARD``. Raises VerifierError for any other."""
    if isinstance(result, RewardParts):
        parts = {str(name): _finite(value, f"{verifier}: part {name!r}") for name, value in result.parts.items()}
        for name in parts:
            if problem := half_character(name):
                raise VerifierError(f"{verifier}: part {name!r}: in its name {problem}")
        return RewardParts(value=_finite(result.value, verifier), parts=parts)
    return RewardParts(value=_finite(result, verifier))


def _finite(value: object, where: str) -> float:
    if not isinstance(value, numbers.Real | np.bool_):
        raise VerifierError(f"{where}: returned {short_repr(value)} ({type(value).__name__}), expected a finite number")
    try:
        number = float(value)
    except OverflowError as error:
        raise VerifierError(f"{where}: returned a number too large for a float") from error
    if not abs(number) <= LARGEST_REWARD:
        raise VerifierError(
            f"{where}: returned {number}, expected a finite number of at most {LARGEST_REWARD:g} in size; scale it"
        )
    return number


def short_repr(value: object) -> str:
    """Return the repr of a value, cut for a message."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
