"""What is kept of an environment with a partial trajectory, so that another worker can go on with it."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply

LARGEST_STATE_BYTES = 1 << 20
"""Snapshots rest in the queue's memory beside the tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """An environment after a completed turn."""

    turn_count: int
    """Turns that it has been told."""
    reply: EnvironmentReply
    """Its answer to the last of them: the tokens may not hold it yet."""
    reward: float | None
    """Newest reward of the episode."""
    state: bytes
    """What ``SnapshotEnvironment.snapshot`` gave."""

    def to_bytes(self) -> bytes:
        """Encode; DataError when the state is too large to be kept."""
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
        """Decode; DataError when the bytes are no snapshot."""
        try:
            record = json.loads(data)
            reply = EnvironmentReply(text=record["text"], done=record["done"], reward=record["reward"])
            state = base64.b64decode(record["state"], validate=True)
            return Snapshot(turn_count=record["turn_count"], reply=reply, reward=record["reward"], state=state)
        except (ValueError, KeyError, TypeError, binascii.Error) as error:
            raise DataError(f"environment: not a snapshot: {error}") from error
