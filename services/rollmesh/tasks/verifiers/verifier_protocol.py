"""What a verifier is, and what may come out of one."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from rollmesh.errors import VerifierError


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardParts:
    """A reward with the named parts it was made of; the parts are shown, the value is trained on."""

    value: float
    parts: Mapping[str, float] = field(default_factory=dict)


class Verifier(Protocol):
    """Scores one response; runs inside a killing process pool, so it may be slow, but it holds no state.

    An optional attribute ``needs_prompt = True`` adds the prompt's text to the metadata as ``prompt``.
    """

    timeout_means_wrong: bool
    """True: an answer that cannot be checked in time is wrong (value 0). False: the run's policy decides."""

    def verify(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """The reward of a response.

        Raises VerifierError when the metadata lacks what it needs; any other exception means the same to the run.
        Raises TimeoutError when its own limit passed.
        """


@runtime_checkable
class AsyncVerifier(Verifier, Protocol):
    """A verifier that waits more than it computes, for example for an HTTP reply.

    Many of its calls run at once in the service's own loop, outside the process pool: it must not compute.
    """

    concurrency: int
    """Most calls of ``verify_async`` at once."""

    async def verify_async(self, response: str, prompt_metadata: Mapping[str, Any]) -> float | RewardParts:
        """Like ``verify``; every call comes from one event loop."""

    async def aclose(self) -> None:
        """Give connections back."""


def checked_reward(result: object, verifier: str) -> RewardParts:
    """What a verifier returned, as finite floats; raises VerifierError for anything else, never a silent 0."""
    if isinstance(result, RewardParts):
        parts = {str(name): _finite(value, f"{verifier}: part {name!r}") for name, value in result.parts.items()}
        return RewardParts(value=_finite(result.value, verifier), parts=parts)
    return RewardParts(value=_finite(result, verifier))


def _finite(value: object, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise VerifierError(f"{where}: returned {_short(value)} ({type(value).__name__}), expected a finite number")
    try:
        number = float(value)
    except OverflowError as error:
        raise VerifierError(f"{where}: returned a number too large for a float") from error
    if not math.isfinite(number):
        raise VerifierError(f"{where}: returned {number}, expected a finite number")
    return number


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
