"""Reasons that end a run: policy versions that every generator refuses, and dead letters."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from rollmesh.errors import PoliciesRefused
from rollmesh.store.drop_ledger import DeadLetters
from rollmesh.types import GeneratorRecord
from rollmesh.worker.routing import refused_by_all

_NEWEST = 200
_MOST_CHARACTERS = 400
_VARIABLE = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""Ids and numbers, in which equal reasons differ."""


class RefusedPolicies:
    """Rule that ends the run after a number of refused versions in a row, or a time with the same version."""

    def __init__(self, version_limit: int, seconds: float) -> None:
        self._version_limit = version_limit
        self._seconds = seconds
        self._refused_since: tuple[int, float] | None = None
        """Newest version, and the time since which every generator refuses it."""

    def judge(
        self, now: float, newest_version: int, generators: Sequence[GeneratorRecord], *, trains: bool = False
    ) -> PoliciesRefused | None:
        """Return the error that ends the run, or None. ``now`` is in monotonic seconds.

        The time does not count while the trainer ``trains``, because generators may accept the next version.
        """
        refusal = refused_by_all(newest_version, generators)
        if refusal is None:
            self._refused_since = None
            return None
        if trains or self._refused_since is None or self._refused_since[0] != newest_version:
            self._refused_since = (newest_version, now)
        if refusal.refused_count >= self._version_limit:
            reason = (
                f"{refusal.refused_count} versions in a row (generator.refused_versions_limit={self._version_limit})"
            )
        elif now - self._refused_since[1] >= self._seconds:
            reason = f"it for {self._seconds:.0f} s (launcher.start_timeout_seconds)"
        else:
            return None
        remedy = "roll back to an older version or lower trainer.learning_rate"
        if newest_version == 0:
            remedy = "it is the initial model: check the weights of model.path, and that the engine computes this model"
        return PoliciesRefused(
            f"every generator refuses policy version {newest_version} and has refused {reason}: "
            f"{refusal.refused_reason}; {remedy}"
        )


async def commonest_reason(letters: DeadLetters) -> str:
    """Return the commonest reason of the newest dead letters as the end of a sentence; empty without letters."""
    reasons = [" ".join(letter.reason.split()) for letter in await letters.newest(_NEWEST)]
    kinds = Counter(_VARIABLE.sub("#", reason) for reason in reasons)
    if not kinds:
        return ""
    kind, count = kinds.most_common(1)[0]
    example = next(reason for reason in reasons if _VARIABLE.sub("#", reason) == kind)
    return f"; {count} of the newest {len(reasons)} dead letters: {example[:_MOST_CHARACTERS]}"
