"""Agent session: one prompt, one conversation and one reward; every drift of the context adds a trajectory."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.agents.openai_errors import OpenAiError, gone
from rollmesh.agents.session_trajectory import SessionTrajectory
from rollmesh.tasks.sources.derived import AgentTask, task_of
from rollmesh.types import Prompt
from rollmesh.worker.agent_mark import AgentMark


@dataclass(slots=True, kw_only=True)
class AgentSession:
    """State of one session; the marks of its trajectories hold everything that must survive the process."""

    session_id: str
    prompt: Prompt
    group_id: str
    start_time: float
    idle_seconds: float
    trajectories: list[SessionTrajectory] = field(default_factory=list)
    drift_count: int = 0
    ended: str = ""
    """rewarded, given_up, idle or lost; empty while the session is active."""
    reward: float | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Lock of the call or reward in progress."""
    refused_calls: Counter[str] = field(default_factory=Counter)
    """Calls that were refused while another was in progress and are not retried yet, by digest of their context."""
    last_use: float = field(default_factory=time.monotonic)

    @property
    def task(self) -> AgentTask:
        """Task of the agent."""
        return task_of(self.prompt)

    @property
    def newest(self) -> SessionTrajectory:
        """Trajectory that the conversation is in."""
        return self.trajectories[-1]

    @property
    def deadline(self) -> float:
        """Time when a silent session ends, monotonic seconds; it moves on while a call or reward is in progress."""
        return (time.monotonic() if self.lock.locked() else self.last_use) + self.idle_seconds

    @property
    def state(self) -> str:
        """active, parked (a trajectory waits for its next lease), or the way the session ended."""
        if self.ended:
            return self.ended
        return "active" if all(trajectory.rollout is not None for trajectory in self.trajectories) else "parked"

    def touch(self) -> None:
        """Restart the idle timeout."""
        self.last_use = time.monotonic()
        for trajectory in self.trajectories:
            trajectory.notify()

    def check(self) -> None:
        """Raise OpenAiError if the session has ended."""
        if self.ended:
            raise session_ended(self.session_id, self.ended)

    def describe(self, run: str, *, with_task: bool) -> dict[str, Any]:
        """Return the session's JSON."""
        task = self.task
        body: dict[str, Any] = {
            "id": self.session_id,
            "object": "rollmesh.session",
            "model": run,
            "state": self.state,
            "created": int(self.start_time),
            "group_id": self.group_id,
            "trajectories": [_describe_trajectory(trajectory) for trajectory in self.trajectories],
            "drift_count": self.drift_count,
            "reward": self.reward,
            "idle_seconds_left": max(0.0, self.deadline - time.monotonic()),
        }
        if with_task:
            body["messages"] = None if task.messages is None else list(task.messages)
            body["prompt"] = task.text
            body["prompt_token_ids"] = self.prompt.token_ids.tolist()
            body["task"] = dict(task.metadata)
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedSession:
    """Ids, counts and marks of an ended session; its tokens and its task are released."""

    session_id: str
    ended: str
    """rewarded, given_up, idle or lost."""
    marks: tuple[AgentMark, ...]
    """Marks, one per trajectory of the session."""
    description: Mapping[str, Any]
    """Last JSON of the session, without its task and the name of the run."""

    @classmethod
    def of(cls, session: AgentSession) -> EndedSession:
        """Keep only the data of an ended session that later requests ask for."""
        return cls(
            session_id=session.session_id,
            ended=session.ended,
            marks=tuple(trajectory.mark for trajectory in session.trajectories),
            description={**session.describe("", with_task=False), "idle_seconds_left": 0.0},
        )

    def describe(self, run: str) -> dict[str, Any]:
        """Return the session's JSON."""
        return {**self.description, "model": run}


def session_ended(session_id: str, how: str) -> OpenAiError:
    """Return the error for a call in an ended session."""
    return gone(f"session {session_id} has ended: {_ENDS[how]}; open a new session: POST /v1/sessions", "session_ended")


_ENDS = {
    "rewarded": "its reward has been recorded",
    "given_up": "the agent gave it up",
    "idle": "the agent was silent for longer than rollout.agent.idle_timeout_seconds",
    "lost": "the queue has revoked its trajectory (its group was dropped, or it became too stale)",
}


def _describe_trajectory(trajectory: SessionTrajectory) -> dict[str, Any]:
    active = trajectory.active
    return {
        "id": trajectory.trajectory_id,
        "tokens": 0 if active is None else active.token_count,
        "policy_versions": []
        if active is None
        else sorted({s.policy_version for s in active.segments if s.behavior_logprobs is not None}),
    }
