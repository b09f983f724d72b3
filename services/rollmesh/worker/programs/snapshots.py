"""Environment snapshots, stored with partial trajectories so that another worker can resume them."""

from __future__ import annotations

import base64
import binascii
import json
from dataclasses import dataclass

from rollmesh.errors import DataError
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply

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
