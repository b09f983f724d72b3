"""Agent session: one prompt, one conversation and one reward; every drift of the context adds a trajectory.

The service's worker leases the trajectories, and its task waits in ``SessionTrajectory.run`` between the agent's calls.
A call takes the trajectory (``busy``), appends the new environment tokens and samples. During a pause the trajectory
stays leased, and calls wait. Before the worker releases it (shutdown, lost worker session), the worker waits for the
call to stop. A call that finds the trajectory without a lease waits for the next lease and continues at the same token.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rollmesh.agents.answer_stream import AnswerStream, AnswerTurn
from rollmesh.agents.context_match import TurnMark
from rollmesh.agents.openai_errors import OpenAiError, gone, unavailable
from rollmesh.errors import RollmeshError
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.tasks.sources.derived import task_of
from rollmesh.types import FinishReason, Prompt
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.agent_mark import AgentMark, root_of
from rollmesh.worker.program import RolloutContext, RolloutResult

SessionKind = Literal["training", "evaluation"]

_ENDS = {
    "rewarded": "its reward has been recorded",
    "given_up": "the agent gave it up",
    "idle": "the agent was silent for longer than rollout.agent.idle_timeout_seconds",
    "lost": "the queue has revoked its trajectory (its group was dropped, or it became too stale), or its evaluation "
    "has ended",
}

KEY_PREFIX = "sk-"
"""API key of one session: this prefix and the session's id."""
UNWANTED = "unwanted"
"""Reason for giving up a trajectory whose only answer the agent has requested again."""


@dataclass(slots=True, kw_only=True, eq=False)
class AgentSession:
    """State of one session; the marks of its trajectories hold everything that must survive the process."""

    session_id: str
    name: str = ""
    """Name under which the agent opened the session; empty if it asked for one."""
    prompt: Prompt
    group_id: str
    start_time: float
    idle_seconds: float
    pinned_version: int | None = None
    """Policy version that an evaluation's session samples from; None in a session that is trained."""
    trajectories: "list[SessionTrajectory]" = field(default_factory=list)
    team: "list[AgentSession]"
    """Sessions in progress that share one reward, this one included: an agent's and those of its sub-agents."""
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
    def is_root(self) -> bool:
        """False for a session of a sub-agent."""
        return self.session_id == root_of(self.session_id)

    @property
    def kind(self) -> SessionKind:
        """Use of the session's reward: training, or the score of an evaluation."""
        return "training" if self.pinned_version is None else "evaluation"

    @property
    def newest(self) -> "SessionTrajectory":
        """Trajectory that the conversation is in."""
        return self.trajectories[-1]

    @property
    def deadline(self) -> float:
        """Time when a silent team ends, monotonic seconds; it moves on while a call or reward is in progress."""
        is_busy = any(session.lock.locked() for session in self.team)
        last_use = max((session.last_use for session in self.team), default=self.last_use)
        return (time.monotonic() if is_busy else last_use) + self.idle_seconds

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

    def lose(self, why: str) -> None:
        """End the work on all trajectories of the team, and its calls in progress."""
        for trajectory in [trajectory for member in self.team for trajectory in member.trajectories]:
            trajectory.mark_lost(why)
            if trajectory.active is not None:
                trajectory.active.lose(why)

    def check(self) -> None:
        if self.ended:
            raise session_ended(self.session_id, self.ended)

    def describe(self, run: str, *, with_task: bool) -> dict[str, Any]:
        task = task_of(self.prompt)
        body: dict[str, Any] = {
            "id": self.session_id,
            "object": "rollmesh.session",
            "name": self.name or None,
            "parent": None if self.is_root else root_of(self.session_id),
            "api_key": f"{KEY_PREFIX}{self.session_id}",
            "model": run,
            "kind": self.kind,
            "policy_version": self.pinned_version,
            "state": self.state,
            "created": int(self.start_time),
            "group_id": self.group_id,
            "trajectories": [trajectory.describe() for trajectory in self.trajectories],
            "drift_count": self.drift_count,
            "turn_count": self.newest.mark.turn_count if self.trajectories else 0,
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
    name: str
    ended: str
    """rewarded, given_up, idle or lost."""
    marks: tuple[AgentMark, ...]
    """Marks, one per trajectory of the session."""
    description: Mapping[str, Any]
    """Last JSON of the session, without its task and the name of the run."""

    @classmethod
    def of(cls, session: AgentSession) -> "EndedSession":
        """Keep only the data of an ended session that later requests ask for."""
        return cls(
            session_id=session.session_id,
            name=session.name,
            ended=session.ended,
            marks=tuple(trajectory.mark for trajectory in session.trajectories),
            description={**session.describe("", with_task=False), "idle_seconds_left": 0.0},
        )

    def describe(self, run: str) -> dict[str, Any]:
        return {**self.description, "model": run}


def session_ended(session_id: str, how: str) -> OpenAiError:
    """Return the error for a call in an ended session."""
    return gone(f"session {session_id} has ended: {_ENDS[how]}; open a new session: POST /v1/sessions", "session_ended")


class AgentGone(RollmeshError):
    """The agent gave up its session or was silent for too long; its prompt returns to the queue."""


class SessionTrajectory:
    """One trajectory of a session."""

    def __init__(self, session: AgentSession, mark: AgentMark, active: ActiveTrajectory | None = None) -> None:
        self.mark = mark
        self.rollout: RolloutContext | None = None
        """Context of the lease; None while the worker has no lease."""
        self.active = active
        """Tokens of the current lease, or of the last one; None before the first."""
        self.busy = False
        """True while a call works on the trajectory."""
        self.turn: AnswerTurn | None = None
        """Newest answer, once it is complete."""
        self.finish_reason = ""
        """stop or length of the newest answer; empty while it is incomplete."""
        self.stream: AnswerStream | None = None
        """Answer in progress."""
        self.given_up = ""
        """Reason for giving up the trajectory; empty while an agent works on it."""
        self.lost = ""
        """Reason for losing the trajectory; empty while it belongs to the session."""
        self._session = session
        self._stored = mark
        """Newest mark that the queue has."""
        self._saving = asyncio.Lock()
        self._waiter: asyncio.Future[None] | None = None

    @property
    def trajectory_id(self) -> str:
        """Identity of the trajectory; empty before the first lease."""
        return self.active.trajectory_id if self.active is not None else ""

    @property
    def turn_mark(self) -> TurnMark | None:
        """Beginning of the newest turn; None before the first turn."""
        if not self.mark.turn:
            return None
        turn = self.mark.turn
        return TurnMark(characters=int(turn["characters"]), digest=str(turn["digest"]), at=int(turn["at"]))

    @property
    def closed(self) -> bool:
        """True once this process has finished all work on the trajectory."""
        if self.lost:
            return True
        ended = self.mark.ended or bool(self.given_up)
        return ended and self.rollout is None and self.active is not None and self.active.closed

    def describe(self) -> dict[str, Any]:
        segments = () if self.active is None else self.active.segments
        return {
            "id": self.trajectory_id,
            "tokens": sum(map(len, segments)),
            "policy_versions": sorted({s.policy_version for s in segments if s.behavior_logprobs is not None}),
        }

    def begin_turn(self, turn: TurnMark) -> None:
        """Begin a turn; its mark is stored with the tokens of the next save."""
        self.mark = replace(self.mark, turn=asdict(turn), turn_starts=(*self.mark.turn_starts, turn.at))
        self.turn, self.finish_reason = None, ""

    def rewind(self, active: ActiveTrajectory) -> None:
        """Return to the newest turn that the queue has: a new lease may lack one that had just begun."""
        if self.turn_mark is not None and active.token_count < self.turn_mark.at:
            self.mark = self._stored

    async def save(self, rollout: RolloutContext) -> None:
        """Save all tokens, and in the same step the mark if it has changed."""
        if self.mark is not self._stored:
            await self.save_mark(rollout)
        else:
            await rollout.save(rollout.active)

    async def save_mark(self, rollout: RolloutContext, **changes: Any) -> None:
        """Save changes of the mark, with all tokens before it, then apply them.

        Conflict if another session in progress has the session's name.
        """
        active = rollout.active
        async with self._saving:
            mark = replace(self.mark, **changes)
            unsaved = rollout.pinned_version is None and active.saved_token_count < active.token_count
            await (rollout.save if unsaved else rollout.keep_snapshot)(active, *_words(mark))
            self.mark = self._stored = mark

    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Wait until the agent has posted its reward; the worker runs this.

        Raises Parked and LetGo like every program, and AgentGone if the agent gave up or was silent for too long.
        """
        active = self.active = rollout.active
        active.observe(self._on_change)
        self.rollout = rollout
        self.notify()
        registrations = active.registrations
        try:
            while True:
                if registrations != active.registrations:  # Redis may have lost the newest mark
                    registrations = active.registrations
                    async with self._saving:
                        await rollout.keep_snapshot(active, *_words(self._stored))
                if not self.busy:
                    if self.mark.ended and not self.given_up:
                        return self._result()
                    active.check_lost()
                    if active.park_reason is ReleaseReason.DRAINED:
                        await self.save(rollout)
                        raise Parked(ReleaseReason.DRAINED)
                    if self.given_up or time.monotonic() >= self._session.deadline:
                        return await self._give_up(rollout)
                await self._wait(self._session.deadline if not self.busy else None)
        except LetGo as error:
            self.mark_lost(str(error))
            raise
        finally:
            self.rollout = None
            self.notify()

    async def wait_ready(self, deadline: float) -> RolloutContext:
        """Wait for a lease under which sampling may continue; OpenAiError after ``deadline``."""
        while True:
            self.check()
            if self.rollout is not None and self.rollout.active.wanted:
                return self.rollout
            if time.monotonic() >= deadline:
                raise unavailable(
                    "the session's trajectory has no lease: the run is paused, or the pool is full; send the same call "
                    "again",
                    "session_parked",
                    2.0,
                )
            await self._wait(deadline)

    async def wait_recorded(self, deadline: float) -> bool:
        """Wait until the queue has recorded the outcome; return False if the trajectory is lost.

        Raises OpenAiError after ``deadline``.
        """
        while not (self.active is not None and self.active.closed and self.rollout is None):
            self.check()
            if time.monotonic() >= deadline:
                raise unavailable("the reward is stored but not scored yet; send it again", "not_scored_yet", 2.0)
            await self._wait(deadline)
        return self.active.recorded

    def check(self) -> None:
        """Raise OpenAiError if the trajectory no longer belongs to the session."""
        # While a call is in progress, ``run`` does not look.
        why = self.lost or (self.rollout.active.lost if self.rollout is not None else "")
        if why:
            raise gone(f"the session has ended: {why}; open a new session: POST /v1/sessions", "session_ended")

    def drop_turns(self, drift_count: int) -> None:
        """Drop the turns: the trajectory restarts, and its next turn is the first one."""
        self.mark = replace(
            self.mark, turn={}, turn_starts=(), first_turn=self.mark.turn_count, drift_count=drift_count
        )
        self.turn, self.finish_reason = None, ""

    def mark_lost(self, why: str) -> None:
        self.lost = self.lost or why or "the queue has revoked its trajectory"
        self.notify()

    def give_up(self, why: str) -> None:
        self.given_up = why
        self.notify()

    def notify(self) -> None:
        """Wake every waiter to check the state again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _on_change(self, active: ActiveTrajectory) -> None:
        if self.stream is not None:
            self.stream.update(active)
        self.notify()

    async def _give_up(self, rollout: RolloutContext) -> RolloutResult:
        self.given_up = self.given_up or "idle"
        if rollout.active.token_count:
            await rollout.restart(rollout.active)
        raise AgentGone(f"agent session {self.mark.session_id}: {self.given_up}")

    def _result(self) -> RolloutResult:
        reason = FinishReason(self.mark.finish_reason)
        team = (trajectory for member in self._session.team for trajectory in member.trajectories)
        others = (other.active for other in team if other is not self and other.active is not None)
        return RolloutResult(
            reason=reason,
            outcome=None if self.mark.ask_verifier else self.mark.outcome,
            further_tokens=sum(active.token_count for active in others),
        )

    async def _wait(self, until: float | None) -> None:
        """Wait until the state changes. Do not await between a check and this call: a change would be missed."""
        if self._waiter is None:
            self._waiter = asyncio.get_running_loop().create_future()
        seconds = None if until is None else max(0.0, until - time.monotonic())
        await asyncio.wait([self._waiter], timeout=seconds)


def _words(mark: AgentMark) -> tuple[bytes, str, str]:
    """Return a mark as it is stored, the id of its session's team, and the session's name."""
    return mark.to_bytes(), root_of(mark.session_id), mark.session_name
