"""Turns of a multi-turn response, recovered from its tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.types import Int32Array, Segment, SegmentSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Tokens of the policy up to a stop token."""

    token_ids: Int32Array  # [tokens]; the stop token is the last one of a complete turn
    complete: bool
    """True if the turn ends in a stop token."""
    answered: bool
    """True if environment tokens follow the turn."""


def turns_of(segments: Sequence[Segment], stop_token_ids: Collection[int]) -> list[Turn]:
    """Split a response into turns, in order; an unfinished last turn is included.

    The stop tokens are the boundaries: chunk and version borders inside a turn do not matter.
    """
    turns: list[Turn] = []
    open_ids: list[Int32Array] = []
    for segment in segments:
        if segment.source is SegmentSource.ENVIRONMENT:
            if turns and not open_ids:
                last = turns[-1]
                turns[-1] = Turn(token_ids=last.token_ids, complete=last.complete, answered=True)
            continue
        start = 0
        for end in np.flatnonzero(np.isin(segment.token_ids, list(stop_token_ids))) + 1:
            open_ids.append(segment.token_ids[start:end])
            turns.append(Turn(token_ids=np.concatenate(open_ids), complete=True, answered=False))
            open_ids, start = [], int(end)
        if start < len(segment.token_ids):
            open_ids.append(segment.token_ids[start:])
    if open_ids:
        turns.append(Turn(token_ids=np.concatenate(open_ids), complete=False, answered=False))
    return turns
