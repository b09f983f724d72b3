"""Sessions of agents: the program of the service's worker that gives them trajectories.

The worker leases a new trajectory for every waiting agent, and every partial trajectory: those parked during a pause,
and those of a crashed service, whose sessions continue here.
"""

from __future__ import annotations

import asyncio
import re
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from rollmesh.agents.agent_session import (
    UNWANTED,
    AgentGone,
    AgentSession,
    EndedSession,
    SessionTrajectory,
)
from rollmesh.agents.agents_metrics import SESSION_STATES, OpenAiMetrics
from rollmesh.agents.openai_errors import busy
from rollmesh.errors import Conflict
from rollmesh.runtime.logging import get_logger
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import Prompt, RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.agent_mark import AgentMark, posted_outcome, root_of
from rollmesh.worker.program import RolloutContext, RolloutResult

_SESSION_ID = re.compile(r"ses-[0-9a-f]{32}(\.[0-9]+)?")
_LEASE_SECONDS = 5.0
"""Longest time that a request without a wait is held until the worker has asked the queue for a prompt."""
_REMEMBERED_SESSIONS = 4096
"""Number of ended sessions whose ids, counts and marks are kept."""


_Waiting = tuple[str, asyncio.Future[AgentSession | None]]
"""Name (or an empty text) and future of a session that an agent waits for; None if another replica has opened it."""


def is_session_id(text: str) -> bool:
    """Tell whether a service may have made this session id."""
    return _SESSION_ID.fullmatch(text) is not None


class SessionManager:
    """Owner of the sessions; assigns trajectories to sessions and sessions to agents."""

    def __init__(self, metrics: OpenAiMetrics, idle_seconds: float) -> None:
        self._metrics = metrics
        self._idle_seconds = idle_seconds
        self.work_due = asyncio.Event()
        """Set when an agent starts to wait for a trajectory; the worker clears it."""
        self._lease_ended = asyncio.Event()
        self._empty_leases = 0
        """Number of times that the worker has asked the queue for work and received none."""
        self._sessions: dict[str, AgentSession] = {}
        self._teams: dict[str, list[AgentSession]] = {}
        """Sessions in progress by the id of the session that gets their reward."""
        self._ended: OrderedDict[str, EndedSession] = OrderedDict()
        self._ids_by_name: dict[str, str] = {}
        """Ids of the sessions, ended ones included, that agents have named."""
        self._opening: set[str] = set()
        """Names of the sessions that calls are opening."""
        self._trajectories: dict[str, SessionTrajectory] = {}
        self._waiting: deque[_Waiting] = deque()
        self._log = get_logger("agents")

    def find(self, id_or_name: str) -> AgentSession | EndedSession | None:
        """Return an active or recently ended session, or None."""
        session_id = self._ids_by_name.get(id_or_name, id_or_name)
        return self._sessions.get(session_id) or self._ended.get(session_id)

    @property
    def sessions(self) -> list[AgentSession]:
        return list(self._sessions.values())

    def wanted(self) -> int:
        """Return the number of new trajectories that agents wait for."""
        return sum(1 for _, future in self._waiting if not future.done())

    def lease_attempted(self, leased_count: int) -> None:
        """Record that the queue has answered the worker's request for work."""
        self._empty_leases += not leased_count
        self._lease_ended.set()
        self._lease_ended = asyncio.Event()

    @contextmanager
    def opening(self, name: str) -> Iterator[None]:
        """Keep the name of a session for the call that opens it; OpenAiError if another call does. No name is free."""
        if name in self._opening:
            raise busy(f"session {name}: another call is opening it", "session_busy")
        if name:
            self._opening.add(name)
        try:
            yield
        finally:
            self._opening.discard(name)

    async def open(self, wait_seconds: float, name: str = "") -> AgentSession | None:
        """Wait for a session with a new prompt; None after ``wait_seconds``, but not before the queue was asked.

        None at once when another replica has opened a session of this name.

        ``name``: the name by which the agent calls the session; empty without one.

        During a pause or an outage of the queue, and without generators, None is returned up to five seconds later.
        """
        future: asyncio.Future[AgentSession | None] = asyncio.get_running_loop().create_future()
        waiting = (name, future)
        self._waiting.append(waiting)
        # The lease in progress, if any, may have begun before this agent came.
        required_leases = self._empty_leases + 2
        self.work_due.set()
        try:
            try:
                async with asyncio.timeout(wait_seconds):
                    return await asyncio.shield(future)
            except TimeoutError:
                await self._until_leased(waiting, required_leases)
                return future.result() if future.done() and not future.cancelled() else None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (session := future.result()) is not None:
                self.end(session, "given_up")
            raise
        finally:
            if not future.done():
                future.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    async def _until_leased(self, waiting: _Waiting, required_leases: int) -> None:
        _, future = waiting
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEASE_SECONDS):
                # A future that has left the queue belongs to a trajectory whose mark is being saved.
                while not future.done() and (waiting not in self._waiting or self._empty_leases < required_leases):
                    ended: asyncio.Future[Any] = asyncio.ensure_future(self._lease_ended.wait())
                    try:
                        await asyncio.wait((future, ended), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        ended.cancel()

    def add_trajectory(self, session: AgentSession, trajectory_id: str) -> SessionTrajectory:
        """Continue the conversation in another trajectory, which the worker is about to run."""
        mark = AgentMark(
            session_id=session.session_id,
            session_name=session.name,
            trajectory_index=session.newest.mark.trajectory_index + 1,
            start_time=session.start_time,
            drift_count=session.drift_count,
            first_turn=session.newest.mark.turn_count,
        )
        trajectory = self._trajectories[trajectory_id] = SessionTrajectory(session, mark)
        session.trajectories.append(trajectory)
        return trajectory

    def add_sub_agent(self, parent: AgentSession, trajectory_id: str) -> AgentSession:
        """Open a session that shares the reward of another one, in a trajectory that the worker is about to run."""
        member = trajectory_id.rpartition(".")[2]
        mark = AgentMark(
            session_id=f"{root_of(parent.session_id)}.{member}", trajectory_index=0, start_time=time.time()
        )
        session = self._make_session(mark, parent.prompt, parent.group_id)
        self._begin(session, SessionTrajectory(session, mark), trajectory_id)
        return session

    def end(self, session: AgentSession, how: str, reward: float | None = None) -> None:
        """End a session and those of its sub-agents; trajectories without a reward return to the queue."""
        if session.ended:
            return
        session.ended, session.reward = how, reward
        self._metrics.sessions_ended.labels(how=how).inc()
        for trajectory in session.trajectories:
            if not trajectory.mark.ended:
                trajectory.give_up(how)
            self._forget(trajectory)
        self._sessions.pop(session.session_id, None)
        if session in session.team:
            session.team.remove(session)
        if not session.team:
            self._teams.pop(root_of(session.session_id), None)
        for other in list(session.team) if session.is_root else ():
            self.end(other, how, reward)
        self._ended[session.session_id] = EndedSession.of(session)
        while len(self._ended) > _REMEMBERED_SESSIONS:
            _, oldest = self._ended.popitem(last=False)
            self._ids_by_name.pop(oldest.name, None)
        self._log.info(
            "agent_session_ended", session=session.session_id, how=how, trajectories=len(session.trajectories)
        )

    def sweep(self) -> None:
        """End sessions that were rewarded before this process took them over; update the gauges."""
        for session in self.sessions:
            every = [trajectory for member in session.team for trajectory in member.trajectories]
            if session.trajectories and all(trajectory.closed for trajectory in every):
                mark = session.newest.mark
                reward = None if mark.outcome is None else mark.outcome.value
                self.end(session, "rewarded" if mark.ended else "lost", reward)
        states = [session.state for session in self.sessions]
        for state in SESSION_STATES:
            self._metrics.sessions.labels(state=state).set(self.wanted() if state == "waiting" else states.count(state))

    # -- the worker's program --------------------------------------------------------------------------------------
    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Keep one trajectory leased for its agent until the agent posts a reward."""
        trajectory = await self._trajectory_for(rollout)
        if trajectory is None:
            raise Parked(ReleaseReason.PAUSED)  # the agent that waited for it has left
        session = self._sessions.get(trajectory.mark.session_id)
        try:
            return await trajectory.run(rollout)
        except AgentGone:
            if session is not None and trajectory.given_up == UNWANTED:
                session.trajectories.remove(trajectory)
                self._forget(trajectory)
            elif session is not None:
                self.end(session, trajectory.given_up)
            raise
        except LetGo:
            if session is not None:
                self.end(session, "lost")
            raise

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the reward that was posted before a crash of the service."""
        return posted_outcome(snapshot)

    async def _trajectory_for(self, rollout: RolloutContext) -> SessionTrajectory | None:
        active = rollout.active
        known = self._trajectories.get(active.trajectory_id)
        if known is not None and not known.lost:
            if _continues(known, active):
                return known
            known.mark_lost("its tokens differ from those in the queue")
            if (session := self._sessions.get(known.mark.session_id)) is not None:
                self.end(session, "lost")
        if active.token_count:
            trajectory = self._taken_over(active)
            if trajectory is not None:
                return trajectory
            # No agent can continue these tokens: their session has ended or was never created.
            await rollout.restart(active)
        return await self._for_waiting_agent(rollout)

    def _taken_over(self, active: ActiveTrajectory) -> SessionTrajectory | None:
        """Take over a partial trajectory of an earlier process."""
        if active.snapshot is None:
            return None
        mark = AgentMark.from_bytes(active.snapshot)
        if {mark.session_id, root_of(mark.session_id)} & self._ended.keys():
            return None
        session = self._sessions.get(mark.session_id)
        if session is None:
            session = self._make_session(mark, active.trajectory.prompt, active.trajectory.group_id)
            self._log.info("agent_session_taken_over", session=mark.session_id, trajectory=active.trajectory_id)
        trajectory = SessionTrajectory(session, mark, active)
        self._begin(session, trajectory, active.trajectory_id)
        session.trajectories.sort(key=lambda t: t.mark.trajectory_index)
        session.drift_count = max(session.drift_count, mark.drift_count)
        return trajectory

    async def _for_waiting_agent(self, rollout: RolloutContext) -> SessionTrajectory | None:
        while self._waiting:
            name, future = self._waiting.popleft()
            if future.done():
                continue
            active = rollout.active
            session_id = f"ses-{secrets.token_hex(16)}"
            mark = AgentMark(session_id=session_id, session_name=name, trajectory_index=0, start_time=time.time())
            session = self._make_session(mark, active.trajectory.prompt, active.trajectory.group_id)
            trajectory = SessionTrajectory(session, mark, active)
            try:
                await trajectory.save_mark(rollout)
            except Conflict:
                future.set_result(None)
                continue
            except BaseException:
                # The lease is lost, and nobody has heard of the session: its agent waits for another trajectory.
                self._waiting.appendleft((name, future))
                self.work_due.set()
                raise
            self._begin(session, trajectory, active.trajectory_id)
            if future.done():  # the agent has left in the meantime
                self.end(session, "given_up")
            else:
                future.set_result(session)
            return trajectory
        return None

    def _make_session(self, mark: AgentMark, prompt: Prompt, group_id: str) -> AgentSession:
        return AgentSession(
            session_id=mark.session_id,
            name=mark.session_name,
            prompt=prompt,
            group_id=group_id,
            start_time=mark.start_time,
            idle_seconds=self._idle_seconds,
            team=self._teams.setdefault(root_of(mark.session_id), []),
        )

    def _begin(self, session: AgentSession, trajectory: SessionTrajectory, trajectory_id: str) -> None:
        """Add a trajectory to a session, which may be new."""
        if session.session_id not in self._sessions:
            self._sessions[session.session_id] = session
            session.team.append(session)
            if session.name:
                self._ids_by_name[session.name] = session.session_id
            self._metrics.sessions_opened.inc()
        session.trajectories.append(trajectory)
        self._trajectories[trajectory_id] = trajectory

    def _forget(self, trajectory: SessionTrajectory) -> None:
        # A group that begins again forgets its forks: the id may belong to a fork of another session by now.
        if self._trajectories.get(trajectory.trajectory_id) is trajectory:
            del self._trajectories[trajectory.trajectory_id]


def _continues(trajectory: SessionTrajectory, active: ActiveTrajectory) -> bool:
    """Tell whether a new lease begins at the state that the session expects, or slightly before it."""
    turn = trajectory.turn_mark
    if active.snapshot is not None and active.token_count:
        mark = AgentMark.from_bytes(active.snapshot)
        if (mark.session_id, mark.trajectory_index) != (trajectory.mark.session_id, trajectory.mark.trajectory_index):
            return False
    return turn is None or active.token_count >= turn.at
