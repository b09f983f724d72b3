"""Sessions of evaluations: agents get them as they get prompts for training, and one pinned version answers them.

The evaluator runs them by the same program as the worker runs its leases. No queue stores them: they end with the
process, and the next one that claims the evaluation begins it again.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import replace

from rollmesh.agents.agent_session import AgentGone, AgentSession, SessionTrajectory
from rollmesh.agents.waiting_agents import WaitingAgents
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.store.queue_types import Fork, LeasedTrajectory
from rollmesh.types import ForkStatus
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo
from rollmesh.worker.program import NobodyAnswers, RolloutContext, RolloutResult

Begin = Callable[[RolloutContext], Awaitable[SessionTrajectory | None]]
Continue = Callable[[SessionTrajectory, RolloutContext], Awaitable[RolloutResult]]


_MOST_FORKS = 8
"""Most further trajectories of one session; training allows one for each member of the group."""


class EvaluationSessions:
    """Offers of an evaluation's trajectories to the agents that wait."""

    def __init__(self, waiting: WaitingAgents, idle_seconds: float, max_attempts: int) -> None:
        """``max_attempts``: sessions in which one trajectory may be abandoned."""
        self._waiting = waiting
        self._idle_seconds = idle_seconds
        self._max_attempts = max_attempts
        self._used = 0.0
        """Last time when an agent had one, monotonic seconds."""
        self._in_progress = 0
        self._forks = BackgroundTasks()

    async def run(self, rollout: RolloutContext, begin: Begin, go_on: Continue) -> RolloutResult:
        """Give the trajectory to agents until one has posted a reward.

        ``begin`` gives it to the agent that waits first, ``go_on`` keeps it until its session ends. Raises AgentGone if
        every attempt was abandoned, and NobodyAnswers if no agent had a session of the evaluation for the idle time.
        """
        for _ in range(self._max_attempts - 1):
            try:
                return await self._attempt(rollout, begin, go_on)
            except AgentGone:
                continue
        return await self._attempt(rollout, begin, go_on)

    async def _attempt(self, rollout: RolloutContext, begin: Begin, go_on: Continue) -> RolloutResult:
        offered = time.monotonic()
        while (trajectory := await begin(rollout)) is None:
            now = time.monotonic()
            left = (now if self._in_progress else max(offered, self._used)) + self._idle_seconds - now
            if left <= 0:
                raise NobodyAnswers(
                    f"no agent took one of its sessions for rollout.agent.idle_timeout_seconds={self._idle_seconds:g}"
                )
            await self._waiting.next_agent(left)
        self._in_progress += 1
        try:
            return await go_on(trajectory, rollout)
        finally:
            self._in_progress -= 1
            self._used = time.monotonic()

    def fork(
        self, session: AgentSession, rollout: RolloutContext, run: Callable[[RolloutContext], Awaitable[RolloutResult]]
    ) -> Fork:
        """Open another trajectory, for a context that has drifted or a sub-agent, as the worker does for training.

        It runs once a session has its id, which the caller adds before its next await.
        """
        index = sum(len(member.trajectories) for member in session.team)
        if index > _MOST_FORKS:
            return Fork(status=ForkStatus.GROUP_FULL)
        first = session.team[0].trajectories[0].trajectory_id
        trajectory = replace(rollout.active.trajectory, trajectory_id=f"{first}.{index}")
        leased = LeasedTrajectory(trajectory=trajectory, attempt=1, first_lease_time=0.0)
        own = replace(rollout, active=ActiveTrajectory(trajectory))

        async def keep() -> None:
            try:
                await run(own)
                own.active.recorded = True
            except (AgentGone, LetGo):
                pass  # the session has ended
            finally:
                own.active.close()

        self._forks.start(keep(), trajectory.trajectory_id)
        return Fork(status=ForkStatus.FORKED, leased=leased)
