"""An agent's session: one prompt, one conversation, one reward; as many trajectories as its context has drifted."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.agents.openai_errors import OpenAiError, gone
from rollmesh.agents.session_trajectory import SessionTrajectory
from rollmesh.tasks.sources.agent import AgentTask, task_of
from rollmesh.types import Int32Array, Prompt
from rollmesh.worker.agent_mark import AgentMark


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """State of one session; everything that has to survive the gateway is in the marks of its parts."""

    session_id: str
    prompt: Prompt
    group_id: str
    start_time: float
    idle_seconds: float
    parts: list[SessionTrajectory] = field(default_factory=list)
    drift_count: int = 0
    ended: str = ""
    """rewarded, given_up, idle or lost; empty while it goes on."""
    reward: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the call or the reward that works on it."""
    last_use: float = field(default_factory=time.monotonic)

    @property
    def task(self) -> AgentTask:
        """What the agent is told."""
        return task_of(self.prompt)

    @property
    def newest(self) -> SessionTrajectory:
        """The trajectory that the conversation is in."""
        return self.parts[-1]

    @property
    def deadline(self) -> float:
        """When silence ends it, monotonic seconds."""
        return self.last_use + self.idle_seconds

    @property
    def state(self) -> str:
        """active, parked (its trajectory waits to be leased again), or how it ended."""
        if self.ended:
            return self.ended
        return "active" if all(part.rollout is not None for part in self.parts) else "parked"

    def touch(self) -> None:
        """The agent gave a sign of life."""
        self.last_use = time.monotonic()
        for part in self.parts:
            part.wake()

    def check(self) -> None:
        """Raise OpenAiError when the session has ended."""
        if self.ended:
            raise session_ended(self.session_id, self.ended)

    def describe(self, run: str, *, with_task: bool) -> dict[str, Any]:
        """The session as the API shows it."""
        task = self.task
        body: dict[str, Any] = {
            "id": self.session_id,
            "object": "rollmesh.session",
            "model": run,
            "state": self.state,
            "created": int(self.start_time),
            "group_id": self.group_id,
            "trajectories": [_describe_part(part) for part in self.parts],
            "drift_count": self.drift_count,
            "reward": self.reward,
            "idle_seconds_left": max(0.0, self.deadline - time.monotonic()),
        }
        if with_task:
            body["messages"] = None if task.messages is None else list(task.messages)
            body["prompt"] = task.text
            body["prompt_token_ids"] = _ids(self.prompt.token_ids)
            body["task"] = dict(task.metadata)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """Ids, counts and marks of an ended session; its tokens and its task are released."""

    session_id: str
    ended: str
    """rewarded, given_up, idle or lost."""
    marks: tuple[AgentMark, ...]
    """One per trajectory of the session."""
    description: Mapping[str, Any]
    """The session as the API showed it last, without its task and the name of the run."""

    @classmethod
    def of(cls, session: AgentSession) -> EndedSession:
        """Keep of a session that has just ended only what later requests ask for."""
        return cls(
            session_id=session.session_id,
            ended=session.ended,
            marks=tuple(part.mark for part in session.parts),
            description={**session.describe("", with_task=False), "idle_seconds_left": 0.0},
        )

    def describe(self, run: str) -> dict[str, Any]:
        """Return the session as the API shows it."""
        return {**self.description, "model": run}


def session_ended(session_id: str, how: str) -> OpenAiError:
    """Make the error for a call in a session that has ended."""
    return gone(f"session {session_id} has ended: {_ENDS[how]}; open another one: POST /v1/sessions", "session_ended")


_ENDS = {
    "rewarded": "its reward is recorded",
    "given_up": "the agent gave it up",
    "idle": "the agent was silent for longer than rollout.agent.idle_timeout_seconds",
    "lost": "the queue has taken its trajectory back (its group was dropped, or it fell too far behind)",
}


def _describe_part(part: SessionTrajectory) -> dict[str, Any]:
    held = part.held
    return {
        "id": part.trajectory_id,
        "tokens": 0 if held is None else held.token_count,
        "policy_versions": []
        if held is None
        else sorted({s.policy_version for s in held.segments if s.behavior_logprobs is not None}),
    }


def _ids(ids: Int32Array) -> list[int]:
    return [int(i) for i in ids]
