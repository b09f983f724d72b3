"""Turns of a multi-turn response, recovered from its tokens, and snapshots from which an environment resumes."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply
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


LARGEST_STATE_BYTES = 1 << 20
"""Largest state of an environment; snapshots take memory of the queue, beside the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An environment after a completed turn."""

    turn_count: int
    """Number of turns played."""
    reply: EnvironmentReply
    """Reply to the last of these turns; its tokens may not be saved yet."""
    reward: float | None
    """Newest reward of the episode."""
    state: bytes
    """Result of ``SnapshotEnvironment.snapshot``."""

    def to_bytes(self) -> bytes:
        """Encode as JSON; raises DataError if the state is too large."""
        if len(self.state) > LARGEST_STATE_BYTES:
            raise DataError(f"environment: a snapshot of {len(self.state)} bytes; the limit is {LARGEST_STATE_BYTES}")
        record = {
            "turn_count": self.turn_count,
            "text": self.reply.text,
            "done": self.reply.done,
            "reward": self.reward,
            "state": base64.b64encode(self.state).decode(),
        }
        return json.dumps(record).encode()

    @staticmethod
    def from_bytes(data: bytes) -> Snapshot:
        """Decode; raises DataError if the bytes are not a snapshot."""
        try:
            record = json.loads(data)
            reply = EnvironmentReply(text=record["text"], done=record["done"], reward=record["reward"])
            state = base64.b64decode(record["state"], validate=True)
            return Snapshot(turn_count=record["turn_count"], reply=reply, reward=record["reward"], state=state)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise DataError(f"environment: not a snapshot: {error}") from error
