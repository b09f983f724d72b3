"""Commonest reason of the newest dead letters, for the message that ends a run."""

from __future__ import annotations

import re
from collections import Counter

from rollmesh.store.drop_ledger import DeadLetters

_NEWEST = 200
_MOST_CHARACTERS = 400
_VARIABLE = re.compile(r"\b[0-9a-f]{8,}\b|\d+")
"""Ids and numbers, in which equal reasons differ."""


async def commonest_reason(letters: DeadLetters) -> str:
    """Return the commonest reason of the newest dead letters as the end of a sentence; empty without letters."""
    reasons = [" ".join(letter.reason.split()) for letter in await letters.newest(_NEWEST)]
    kinds = Counter(_VARIABLE.sub("#", reason) for reason in reasons)
    if not kinds:
        return ""
    kind, count = kinds.most_common(1)[0]
    example = next(reason for reason in reasons if _VARIABLE.sub("#", reason) == kind)
    return f"; {count} of the newest {len(reasons)} dead letters: {example[:_MOST_CHARACTERS]}"
