"""What an environment is: one object per trajectory, driven turn by turn."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from rollmesh.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentReply:
    """What the environment says to one turn of the policy."""

    text: str
    """Appended to the context as environment tokens, never in the loss; may be empty."""
    done: bool
    """Whether the episode is over."""
    reward: float | None = None
    """Reward of the whole episode, with ``done``; None leaves it to the verifier."""


class Environment(Protocol):
    """One episode.

    Calls are at-least-once: after a crash a turn can be sent again with the same ``idempotency_key``
    (``<trajectory_id>:<turn>``), and an environment with effects outside itself must then not repeat them.
    """

    replayable: bool
    """True: sending all turns again to a fresh environment leads to the same state and the same replies. Otherwise it
    must be a SnapshotEnvironment, or a lost worker starts the trajectory over."""

    async def reset(self, prompt: Prompt) -> None:
        """Begin the episode of a prompt; called once, first."""

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        """Answer what the policy wrote in one turn, special tokens aside.

        What a policy writes is never an error; an exception means that the environment itself failed.
        """

    async def aclose(self) -> None:
        """Give up what the episode holds; called once, last, also after an error."""


@runtime_checkable
class SnapshotEnvironment(Environment, Protocol):
    """An environment whose state can be saved with the partial trajectory."""

    def snapshot(self) -> bytes:
        """The state after the last completed step."""

    def restore(self, state: bytes) -> None:
        """Continue from a snapshot; called after ``reset``, in place of the turns it covers."""
