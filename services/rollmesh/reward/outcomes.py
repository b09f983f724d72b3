"""Reward outcomes of verifiers that failed or timed out."""

from __future__ import annotations

from rollmesh.types import OutcomeKind, RewardOutcome

_LONGEST_MESSAGE = 500


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


def _clean(message: str) -> str:
    """Shorten a message and replace characters that cannot be encoded: messages quote answers."""
    return message[:_LONGEST_MESSAGE].encode("utf-8", "replace").decode()
