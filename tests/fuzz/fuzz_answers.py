"""Answers of ports to random requests, and the choices that requests to all ports share."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fuzz_values import Values

_CANCELLED_SHARE = 0.08
_CANCELLED_SECONDS = (0.0, 0.001, 0.01, 0.1)
_THINNED_SHARE = 0.02
"""Share of the requests with an effect on the run that are sent."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a request."""

    outcome: str
    """Outcome: gRPC code, HTTP status, ``cancelled`` or ``closed``."""
    detail: str = ""
    fault: bool = False
    backpressure: bool = False
    """True for a documented temporary rejection: UNAVAILABLE with the error's class, 503 with Retry-After or a JSON
    error."""


def random_token(rng: random.Random, token: str) -> str:
    """Return the right token in most cases, otherwise none or a wrong token."""
    return rng.choices((token, "", "wrong", token[:-1], "x" * 5_000), (80, 8, 4, 4, 4))[0]


def random_values(rng: random.Random, known: Mapping[str, Sequence[Any]]) -> Values:
    """Return a source of values of which few, some or all are absurd."""
    return Values(rng, known, rng.choice((0.03, 0.3, 1.0)))


def random_time_limit(rng: random.Random, seconds: float | None) -> float | None:
    """Return the time until our side ends the request: ``seconds`` in most cases, otherwise very short."""
    return rng.choice(_CANCELLED_SECONDS) if rng.random() < _CANCELLED_SHARE else seconds


def is_rarely_sent(rng: random.Random) -> bool:
    """Return True for the few requests with an effect on the run that are sent."""
    return rng.random() < _THINNED_SHARE
