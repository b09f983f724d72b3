"""Agents that wait for a session: the demand for trajectories, the order in which they are given, and evaluations.

Agents get the sessions of an evaluation as they get prompts for training, and one pinned version answers them. The
evaluator runs them by the same program as the worker runs its leases. No queue stores them: they end with the process,
and the next one that claims the evaluation begins it again.
"""

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.agents.agent_session import AgentGone, AgentSession, SessionKind, SessionTrajectory
from rollmesh.agents.openai_errors import busy
from rollmesh.agents.openai_requests import WantedKind
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.store.queue_types import Fork, LeasedTrajectory
from rollmesh.types import ForkStatus
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo
from rollmesh.worker.program import NobodyAnswers, RolloutContext, RolloutResult

_LEASE_SECONDS = 5.0
"""Longest time that a request without a wait is held until the worker has asked the queue for a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WaitingAgent:
    """One agent that waits for a session."""

    name: str
    """Name that the agent gives its session; empty without one."""
    kind: WantedKind
    session: asyncio.Future[AgentSession | None]
    """None if another replica has opened a session of this name."""

    @property
    def takes_training(self) -> bool:
        """True while the agent waits for a trajectory that is trained."""
        return not self.session.done() and self.kind != "evaluation"


class WaitingAgents:
    """Queue of waiting agents; the worker leases a new trajectory for each (its ``Demand``)."""

    def __init__(self, on_left: Callable[[AgentSession], None]) -> None:
        """``on_left`` gets the session of an agent that has left before it could hear of it."""
        self.work_due = asyncio.Event()
        """Set when an agent starts to wait for a trajectory; the worker clears it."""
        self._on_left = on_left
        self._lease_ended = asyncio.Event()
        self._came = asyncio.Event()
        self._empty_leases = 0
        """Number of times that the worker has asked the queue for work and received none."""
        self._opening: set[str] = set()
        """Names of the sessions that calls are opening."""
        self._waiting: deque[WaitingAgent] = deque()

    def __len__(self) -> int:
        return sum(not waiting.session.done() for waiting in self._waiting)

    def wanted(self) -> int:
        """Return the number of new trajectories for training that agents wait for."""
        return sum(waiting.takes_training for waiting in self._waiting)

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

    async def session(self, wait_seconds: float, name: str = "", kind: WantedKind = "any") -> AgentSession | None:
        """Wait for a session with a new prompt; None after ``wait_seconds``, but not before the queue was asked.

        None at once when another replica has opened a session of this name.

        ``name``: the name by which the agent calls the session; empty without one.

        During a pause or an outage of the queue, and without generators, None is returned up to five seconds later.
        """
        waiting = WaitingAgent(name=name, kind=kind, session=asyncio.get_running_loop().create_future())
        future = waiting.session
        self._add(self._waiting.append, waiting)
        # The lease in progress, if any, may have begun before this agent came.
        required_leases = self._empty_leases + 2
        try:
            try:
                async with asyncio.timeout(wait_seconds):
                    return await asyncio.shield(future)
            except TimeoutError:
                await self._until_leased(waiting, required_leases)
                return future.result() if future.done() and not future.cancelled() else None
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and (session := future.result()) is not None:
                self._on_left(session)
            raise
        finally:
            if not future.done():
                future.cancel()
            if waiting in self._waiting:
                self._waiting.remove(waiting)

    def take(self, kind: SessionKind) -> WaitingAgent | None:
        """Remove and return the first agent that takes a session of this kind; None without one."""
        for waiting in self._waiting:
            if not waiting.session.done() and waiting.kind in ("any", kind):
                self._waiting.remove(waiting)
                return waiting
        return None

    def put_back(self, waiting: WaitingAgent) -> None:
        """Let an agent wait again, first of all: the trajectory that it should have is lost."""
        self._add(self._waiting.appendleft, waiting)

    async def next_agent(self, seconds: float) -> None:
        """Wait until another agent comes, at most so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._came.wait()

    def _add(self, put: Callable[[WaitingAgent], None], waiting: WaitingAgent) -> None:
        put(waiting)
        self.work_due.set()
        self._came.set()
        self._came = asyncio.Event()

    async def _until_leased(self, waiting: WaitingAgent, required_leases: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(_LEASE_SECONDS):
                # An agent that has left the queue gets a trajectory whose mark is being saved.
                while not waiting.session.done() and (
                    waiting not in self._waiting or self._empty_leases < required_leases
                ):
                    ended: asyncio.Future[Any] = asyncio.ensure_future(self._lease_ended.wait())
                    try:
                        await asyncio.wait((waiting.session, ended), return_when=asyncio.FIRST_COMPLETED)
                    finally:
                        ended.cancel()


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
