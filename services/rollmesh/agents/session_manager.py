"""Which trajectory belongs to which agent: the program of the gateway's worker.

The worker leases a new trajectory for every agent that waits for one, and every partial trajectory there is: those
that came to rest in a pause, and those of a gateway that died, whose sessions go on here.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from rollmesh.agents.agent_session import AgentSession, EndedSession
from rollmesh.agents.agents_metrics import SESSION_STATES, OpenAiMetrics
from rollmesh.agents.session_trajectory import UNWANTED, AgentGone, SessionTrajectory
from rollmesh.runtime.logging import get_logger
from rollmesh.store.queue_types import ReleaseReason
from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.agent_mark import AgentMark, posted_outcome
from rollmesh.worker.program import RolloutContext, RolloutResult

_REMEMBERED_SESSIONS = 4096
"""Ended sessions whose ids, counts and marks are kept."""


class SessionManager:
    """Hands trajectories to sessions and sessions to agents."""

    def __init__(self, metrics: OpenAiMetrics, idle_seconds: float) -> None:
        self._metrics = metrics
        self._idle_seconds = idle_seconds
        self.wake_worker: Callable[[], None] = _nothing
        """Called when somebody waits for a trajectory."""
        self._sessions: dict[str, AgentSession] = {}
        self._ended: OrderedDict[str, EndedSession] = OrderedDict()
        self._parts: dict[str, SessionTrajectory] = {}
        self._waiting: deque[asyncio.Future[AgentSession]] = deque()
        self._log = get_logger("agents")

    def find(self, session_id: str) -> AgentSession | EndedSession | None:
        """Find a session among the active and the recently ended ones."""
        return self._sessions.get(session_id) or self._ended.get(session_id)

    @property
    def sessions(self) -> list[AgentSession]:
        """Sessions that go on."""
        return list(self._sessions.values())

    def wanted(self) -> int:
        """New trajectories that agents wait for."""
        return sum(1 for future in self._waiting if not future.done())

    async def open(self, wait_seconds: float) -> AgentSession | None:
        """A session with a new prompt; None when there was none within ``wait_seconds``."""
        future: asyncio.Future[AgentSession] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        self.wake_worker()
        try:
            async with asyncio.timeout(wait_seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            return future.result() if future.done() and not future.cancelled() else None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.end(future.result(), "given_up")
            raise
        finally:
            if not future.done():
                future.cancel()
            if future in self._waiting:
                self._waiting.remove(future)

    def add_part(self, session: AgentSession, trajectory_id: str) -> SessionTrajectory:
        """The conversation goes on in another trajectory, which the worker is about to run."""
        mark = AgentMark(
            session_id=session.session_id,
            part=session.newest.mark.part + 1,
            start_time=session.start_time,
            drift_count=session.drift_count,
        )
        part = self._parts[trajectory_id] = _part(session, mark)
        session.parts.append(part)
        return part

    def end(self, session: AgentSession, how: str, reward: float | None = None) -> None:
        """Nothing more will happen in a session; its parts that are not rewarded wait for other agents."""
        if session.ended:
            return
        session.ended, session.reward = how, reward
        self._metrics.sessions_ended.labels(how=how).inc()
        for part in session.parts:
            if not part.mark.ended:
                part.give_up(how)
            self._parts.pop(part.trajectory_id, None)
        self._sessions.pop(session.session_id, None)
        self._ended[session.session_id] = EndedSession.of(session)
        while len(self._ended) > _REMEMBERED_SESSIONS:
            self._ended.popitem(last=False)
        self._log.info("agent_session_ended", session=session.session_id, how=how, trajectories=len(session.parts))

    def sweep(self) -> None:
        """Close sessions that were rewarded before this gateway took them over; update the gauges."""
        for session in self.sessions:
            if session.parts and all(part.over for part in session.parts):
                mark = session.newest.mark
                reward = None if mark.outcome is None else mark.outcome.value
                self.end(session, "rewarded" if mark.ended else "lost", reward)
        states = [session.state for session in self.sessions]
        for state in SESSION_STATES:
            self._metrics.sessions.labels(state=state).set(self.wanted() if state == "waiting" else states.count(state))

    # -- the worker's program --------------------------------------------------------------------------------------
    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Hold one trajectory for its agent until it is rewarded."""
        part = await self._part_for(rollout)
        if part is None:
            raise Parked(ReleaseReason.PAUSED)  # the agent that wanted it has left
        session = self._sessions.get(part.mark.session_id)
        try:
            return await part.hold(rollout)
        except AgentGone:
            if session is not None and part.given_up == UNWANTED:
                session.parts.remove(part)
                self._parts.pop(part.trajectory_id, None)
            elif session is not None:
                self.end(session, part.given_up)
            raise
        except LetGo:
            if session is not None:
                self.end(session, "lost")
            raise

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """The reward that was posted before a gateway died."""
        return posted_outcome(snapshot)

    async def _part_for(self, rollout: RolloutContext) -> SessionTrajectory | None:
        held = rollout.held
        known = self._parts.get(held.trajectory_id)
        if known is not None and not known.lost:
            if _continues(known, held):
                return known
            self._disown(known)
        if held.token_count:
            part = self._taken_over(held)
            if part is not None:
                return part
            # Nobody can go on from these tokens: their session has ended, or never came to be.
            await rollout.restart(held)
        return await self._for_whoever_waits(rollout)

    def _taken_over(self, held: ActiveTrajectory) -> SessionTrajectory | None:
        """The part of a partial trajectory of another gateway, or of an earlier life of this one."""
        if held.snapshot is None:
            return None
        mark = AgentMark.from_bytes(held.snapshot)
        if mark.session_id in self._ended:
            return None
        session = self._sessions.get(mark.session_id)
        if session is None:
            session = self._new_session(mark.session_id, held, mark.start_time)
            self._log.info("agent_session_taken_over", session=mark.session_id, trajectory=held.trajectory_id)
        part = _part(session, mark)
        part.held = held
        session.parts.append(part)
        session.parts.sort(key=lambda p: p.mark.part)
        session.drift_count = max(session.drift_count, mark.drift_count)
        self._parts[held.trajectory_id] = part
        return part

    async def _for_whoever_waits(self, rollout: RolloutContext) -> SessionTrajectory | None:
        while self._waiting:
            future = self._waiting.popleft()
            if future.done():
                continue
            held = rollout.held
            session = self._new_session(f"ses-{secrets.token_hex(16)}", held, time.time())
            part = _part(session, AgentMark(session_id=session.session_id, part=0, start_time=session.start_time))
            part.held = held
            session.parts.append(part)
            self._parts[held.trajectory_id] = part
            await part.keep(rollout)
            if future.done():  # the agent left meanwhile
                self.end(session, "given_up")
            else:
                future.set_result(session)
            return part
        return None

    def _new_session(self, session_id: str, held: ActiveTrajectory, start_time: float) -> AgentSession:
        session = self._sessions[session_id] = AgentSession(
            session_id=session_id,
            prompt=held.trajectory.prompt,
            group_id=held.trajectory.group_id,
            start_time=start_time,
            idle_seconds=self._idle_seconds,
        )
        self._metrics.sessions_opened.inc()
        return session

    def _disown(self, part: SessionTrajectory) -> None:
        part.lose("its tokens are no longer those that the queue has")
        session = self._sessions.get(part.mark.session_id)
        if session is not None:
            self.end(session, "lost")


def _part(session: AgentSession, mark: AgentMark) -> SessionTrajectory:
    return SessionTrajectory(mark, lambda: session.deadline)


def _continues(part: SessionTrajectory, held: ActiveTrajectory) -> bool:
    """Whether a trajectory that was leased again is where its part left it, or a little before."""
    turn = part.turn_mark
    if held.snapshot is not None and held.token_count:
        mark = AgentMark.from_bytes(held.snapshot)
        if (mark.session_id, mark.part) != (part.mark.session_id, part.mark.part):
            return False
    return turn is None or held.token_count >= turn.at


def _nothing() -> None:
    """No worker yet."""
