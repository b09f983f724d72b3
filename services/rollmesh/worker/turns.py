"""Turns of a multi-turn response, recovered from its tokens, and snapshots from which an environment resumes."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from pydantic import ConfigDict, TypeAdapter, ValidationError

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
from rollmesh.types import Int32Array, Segment, SegmentSource

LARGEST_STATE_BYTES = 1 << 20
"""Largest state of an environment; snapshots take memory of the queue, beside the tokens."""


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


def returns_of(rewards: Sequence[float], final: float = 0.0) -> list[float]:
    """Return ``final + sum_{k >= t} r_k`` for every turn t; ``final`` is a reward of the end."""
    return list(accumulate(reversed(rewards), initial=final))[:0:-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An environment after a completed turn."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64", ser_json_inf_nan="constants")
    turn_count: int
    """Number of turns played."""
    reply: EnvironmentReply
    """Reply to the last of these turns; its tokens may not be saved yet."""
    reward: float | None
    """Newest reward of the episode."""
    rewards_before: tuple[float, ...] = ()
    """Reward of the episode before each of these turns."""
    state: bytes
    """Result of ``SnapshotEnvironment.snapshot``."""

    def to_bytes(self) -> bytes:
        """Encode as JSON; raises DataError if the state is too large."""
        if len(self.state) > LARGEST_STATE_BYTES:
            raise DataError(f"environment: a snapshot of {len(self.state)} bytes; the limit is {LARGEST_STATE_BYTES}")
        return _SNAPSHOTS.dump_json(self)

    @staticmethod
    def from_bytes(data: bytes) -> "Snapshot":
        """Decode; raises DataError if the bytes are not a snapshot."""
        try:
            return _SNAPSHOTS.validate_json(data)
        except ValidationError as error:
            raise DataError(f"environment: not a snapshot: {error}") from error


_SNAPSHOTS = TypeAdapter(Snapshot)
