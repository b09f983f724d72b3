"""Outcomes without a reward from a verifier."""

from __future__ import annotations

from rollmesh.types import OutcomeKind, RewardOutcome

_LONGEST_MESSAGE = 500


def timed_out(message: str, means_wrong: bool) -> RewardOutcome:
    """The verifier ran out of time.

    Where the verifier has declared that this means a wrong answer, the answer is scored 0 and marked by the part
    ``timed_out``; otherwise the outcome has no value and the run's policy decides.
    """
    if means_wrong:
        return RewardOutcome(kind=OutcomeKind.SCORED, value=0.0, parts={"timed_out": 1.0}, message=_clean(message))
    return RewardOutcome(kind=OutcomeKind.TIMED_OUT, message=_clean(message))


def verifier_error(message: str) -> RewardOutcome:
    """The verifier failed, or returned something that is no number."""
    return RewardOutcome(kind=OutcomeKind.VERIFIER_ERROR, message=_clean(message))


def _clean(message: str) -> str:
    """Short, and text that can be encoded: messages quote answers."""
    return message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()
