"""Sessions of agents: the program of the service's worker that gives them trajectories.

The worker leases a new trajectory for every waiting agent, and every partial trajectory: those parked during a pause,
and those of a crashed service, whose sessions continue here.
"""

import asyncio
import re
import secrets
import time
from collections import OrderedDict

from rollmesh.agents.agent_session import (
    UNWANTED,
    AgentGone,
    AgentSession,
    EndedSession,
    SessionKind,
    SessionTrajectory,
)
from rollmesh.agents.agents_metrics import SESSION_STATES, OpenAiMetrics
from rollmesh.agents.waiting_agents import EvaluationSessions, WaitingAgents
from rollmesh.config.rollout import RolloutConfig
from rollmesh.errors import Conflict
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.store.queue_types import Fork, ReleaseReason
from rollmesh.types import Prompt, RewardOutcome, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.agent_mark import AgentMark, posted_outcome, root_of
from rollmesh.worker.program import RolloutContext, RolloutResult

_SESSION_ID = re.compile(r"ses-[0-9a-f]{32}(\.[0-9]+)?")
_REMEMBERED_SESSIONS = 4096
"""Number of ended sessions whose ids, counts and marks are kept."""
_SILENT_SHARE = 0.1
"""Share of the idle timeout after which a session without a call is shown as a wait: its agent may be gone."""


def is_session_id(text: str) -> bool:
    """Tell whether a service may have made this session id."""
    return _SESSION_ID.fullmatch(text) is not None


class SessionManager:
    """Owner of the sessions; assigns trajectories to sessions and sessions to agents."""

    def __init__(self, metrics: OpenAiMetrics, rollout: RolloutConfig) -> None:
        self._metrics = metrics
        self._idle_seconds = rollout.agent.idle_timeout_seconds
        self.waiting = WaitingAgents(lambda session: self.end(session, "given_up"))
        self._evaluations = EvaluationSessions(self.waiting, self._idle_seconds, rollout.max_attempts)
        self._sessions: dict[str, AgentSession] = {}
        self._teams: dict[str, list[AgentSession]] = {}
        """Sessions in progress by the id of the session that gets their reward."""
        self._ended: OrderedDict[str, EndedSession] = OrderedDict()
        self._ids_by_name: dict[str, str] = {}
        """Ids of the sessions, ended ones included, that agents have named."""
        self._trajectories: dict[str, SessionTrajectory] = {}
        self._log = get_logger("agents")

    def find(self, id_or_name: str) -> AgentSession | EndedSession | None:
        """Return an active or recently ended session, or None."""
        session_id = self._ids_by_name.get(id_or_name, id_or_name)
        return self._sessions.get(session_id) or self._ended.get(session_id)

    @property
    def sessions(self) -> list[AgentSession]:
        return list(self._sessions.values())

    def fork_evaluation(self, session: AgentSession, rollout: RolloutContext) -> Fork:
        """Open one more trajectory of an evaluation's session; the caller adds it before its next await."""
        return self._evaluations.fork(
            session, rollout, lambda own: self._go_on(self._trajectories[own.active.trajectory_id], own)
        )

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
        session.pinned_version = parent.pinned_version
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

    def sweep(self, waits: Waits) -> None:
        """End sessions that were rewarded before this process took them over; update the gauges and ``waits``."""
        for session in self.sessions:
            every = [trajectory for member in session.team for trajectory in member.trajectories]
            if session.trajectories and all(trajectory.closed for trajectory in every):
                mark = session.newest.mark
                reward = None if mark.outcome is None else mark.outcome.value
                self.end(session, "rewarded" if mark.ended else "lost", reward)
        states = [session.state for session in self.sessions] + ["waiting"] * len(self.waiting)
        for state in SESSION_STATES:
            self._metrics.sessions.labels(state=state).set(states.count(state))
        self._show_silent(waits)

    def _show_silent(self, waits: Waits) -> None:
        """Show the sessions that hold their place in the pool without a call: the run may wait for a dead agent."""
        now = time.monotonic()
        silent = [s.idle_seconds - (s.deadline - now) for s in self.sessions if s.state == "active"]
        silent = [seconds for seconds in silent if seconds > _SILENT_SHARE * self._idle_seconds]
        if not silent:
            return waits.end("agents")
        waits.begin(
            "agents",
            f"{len(silent)} of {len(self._sessions)} sessions had no call for up to {max(silent):.0f} s; if their "
            f"agent is gone, they end after rollout.agent.idle_timeout_seconds={self._idle_seconds:g} or by DELETE "
            "/v1/sessions/ID",
        )

    # -- the worker's program --------------------------------------------------------------------------------------
    async def run(self, rollout: RolloutContext) -> RolloutResult:
        """Keep one trajectory leased for its agent until the agent posts a reward."""
        if rollout.pinned_version is not None:
            return await self._evaluations.run(rollout, self._for_waiting_agent, self._go_on)
        trajectory = await self._trajectory_for(rollout)
        if trajectory is None:
            raise Parked(ReleaseReason.PAUSED)  # the agent that waited for it has left
        return await self._go_on(trajectory, rollout)

    async def _go_on(self, trajectory: SessionTrajectory, rollout: RolloutContext) -> RolloutResult:
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
        except asyncio.CancelledError:
            if session is not None and rollout.pinned_version is not None:
                session.lose("its evaluation has ended")
                self.end(session, "lost")
            raise

    async def outcome_of(self, trajectory: Trajectory, snapshot: bytes | None = None) -> RewardOutcome | None:
        """Return the reward that was posted before a crash of the service."""
        return posted_outcome(snapshot)

    async def _trajectory_for(self, rollout: RolloutContext) -> SessionTrajectory | None:
        active = rollout.active
        known = self._trajectories.get(active.trajectory_id)
        if known is not None and not known.lost:
            known.rewind(active)
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
        kind: SessionKind = "training" if rollout.pinned_version is None else "evaluation"
        while (waiting := self.waiting.take(kind)) is not None:
            active, session_id = rollout.active, f"ses-{secrets.token_hex(16)}"
            mark = AgentMark(
                session_id=session_id, session_name=waiting.name, trajectory_index=0, start_time=time.time()
            )
            session = self._make_session(mark, active.trajectory.prompt, active.trajectory.group_id)
            session.pinned_version = rollout.pinned_version
            trajectory = SessionTrajectory(session, mark, active)
            try:
                await trajectory.save_mark(rollout)
            except Conflict:
                if not waiting.session.done():
                    waiting.session.set_result(None)
                continue
            except BaseException:
                # The lease is lost, and nobody has heard of the session: its agent waits for another trajectory.
                self.waiting.put_back(waiting)
                raise
            self._begin(session, trajectory, active.trajectory_id)
            if waiting.session.done():  # the agent has left in the meantime
                self.end(session, "given_up")
            else:
                waiting.session.set_result(session)
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
            team=self._teams.get(root_of(mark.session_id), []),
        )

    def _begin(self, session: AgentSession, trajectory: SessionTrajectory, trajectory_id: str) -> None:
        """Add a trajectory to a session, which may be new."""
        if session.session_id not in self._sessions:
            self._sessions[session.session_id] = session
            session.team.append(session)
            self._teams[root_of(session.session_id)] = session.team
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
