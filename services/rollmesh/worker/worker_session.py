"""Session of a worker with the trajectory queue: heartbeat, and recovery without loss of trajectories."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from rollmesh.errors import SessionLost, StoreUnavailable
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import Backoff, retry
from rollmesh.store.worker_sessions import Sessions
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.worker_metrics import TrajectoryMetrics

R = TypeVar("R")
Beat = Callable[[], None]
"""Callback that reports one loop as alive; only operations that this loop awaits may call it."""

_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=2.0)


class WorkerSession:
    """Current session id, heartbeat and recovery.

    A session expires when its heartbeat is late (a stalled process) and becomes invalid when Redis is restored to an
    earlier state. In both cases the worker registers its trajectories again. The queue answers which of them it may
    keep and from which token on to save.
    """

    def __init__(
        self,
        sessions: Sessions,
        worker: str,
        heartbeat_seconds: float,
        metrics: TrajectoryMetrics,
        address: str = "",
    ) -> None:
        """``address``: host:port where other processes reach the sessions of agents of this one."""
        self._sessions = sessions
        self._worker = (worker, address)
        self._heartbeat_seconds = heartbeat_seconds
        self._metrics = metrics
        self._log = get_logger("session")
        self._lock = asyncio.Lock()
        self._differing: set[str] = set()
        """Trajectories that only the queue or only this worker counted as leased at the last heartbeat."""
        self.leasing = asyncio.Lock()
        """Lock held from a lease request until its trajectories are in ``trajectories``; it suspends comparisons."""
        self._session = ""
        self._server = ""
        self.trajectories: dict[str, ActiveTrajectory] = {}
        """Trajectories leased by this worker, including finished ones that wait for their reward."""
        self.registrations = 0
        """Number of registrations. A registration releases trajectories that were leased before it and are not in
        ``trajectories`` yet."""
        self._waiting: list[Beat] = []
        """Beats of the loops that wait for the recovery in progress."""

    @property
    def current(self) -> str:
        """Session id; empty before ``open``."""
        return self._session

    async def open(self) -> None:
        """Open the first session."""
        self._session = await self._sessions.open(*self._worker)
        self._server = await self._heartbeat(self._session)

    async def close(self) -> None:
        """Close the session; the queue releases the remaining leases."""
        if self._session:
            await self._sessions.close(self._session)
            self._session = ""

    async def keep_alive(self, beat: Beat) -> None:
        """Send heartbeats until cancelled; ``beat`` is called after each round and at every retry of a recovery."""
        while True:
            started = time.monotonic()
            session = self._session
            try:
                server = await self._heartbeat(session)
                if server != self._server:
                    await self.recover(session, server, beat=beat)
                else:
                    await self._compare(session, beat)
            except SessionLost:
                await self.recover(session, beat=beat)
            except StoreUnavailable as error:
                self._log.warning("heartbeat_failed", message=str(error))
            beat()
            await asyncio.sleep(max(0.0, self._heartbeat_seconds - (time.monotonic() - started)))

    async def call(self, operation: Callable[[str], Awaitable[R]], beat: Beat | None = None) -> R:
        """Run a store operation under the current session, with retries until the store answers.

        A lost session is replaced. During an outage, tokens stay in memory.
        """

        async def attempt() -> R:
            while True:
                session = self._session
                try:
                    return await operation(session)
                except SessionLost:
                    await self.recover(session, beat=beat)

        return await self._retry(attempt, [beat] if beat else [])

    async def confirm(self) -> None:
        """Check that the session is valid, and recover it if not; call it after a rejected write."""
        server = await self.call(self._heartbeat)
        if server != self._server:
            await self.recover(self._session, server)

    async def recover(self, lost: str, server: str | None = None, *, beat: Beat | None = None) -> None:
        """Replace session ``lost`` (or confirm it to a restored server) and register all trajectories again."""
        async with self._recovery(beat):
            if self._session != lost or (server is not None and server == self._server):
                return  # another task has done it
            session = lost
            if server is None:
                self._metrics.sessions_lost.inc()
                session = await self._retry(lambda: self._sessions.open(*self._worker), self._waiting)
            await self._retry(lambda: self._register(session), self._waiting)

    async def _heartbeat(self, session: str) -> str:
        return await self._sessions.heartbeat(session, sum(active.waits for active in self.trajectories.values()))

    async def _compare(self, session: str, beat: Beat) -> None:
        """Register all trajectories again if the queue disagrees about one at two heartbeats in a row.

        A difference at a single heartbeat is normal: the answer to a completed release or score may be on its way.
        """
        if self.leasing.locked():
            return
        async with self.leasing:
            before = self._differing
            self._differing = await self._sessions.held_by(session) ^ self.trajectories.keys()
            if not before & self._differing:
                return
            async with self._recovery(beat):
                if self._session == session:
                    self._log.warning("leases_differ", trajectories=sorted(before & self._differing))
                    await self._retry(lambda: self._register(session), self._waiting)

    @asynccontextmanager
    async def _recovery(self, beat: Beat | None) -> AsyncIterator[None]:
        """Hold the recovery lock; ``beat`` is called at every retry, also while another task recovers."""
        beats = [beat] if beat else []
        self._waiting += beats
        try:
            async with self._lock:
                yield
        finally:
            for each in beats:
                self._waiting.remove(each)

    async def _register(self, session: str) -> None:
        """Register all trajectories under ``session``, then make it current.

        Not before: a lease under the new session could return a trajectory that a task of this worker still writes.
        """
        self.registrations += 1
        saved_before = {active.trajectory_id: active.saved_token_count for active in self.trajectories.values()}
        held_tokens = [active.held_tokens() for active in self.trajectories.values()]
        try:
            answers = await self._sessions.reregister(session, held_tokens, *self._worker)
        except SessionLost:
            session = await self._sessions.open(*self._worker)
            answers = await self._sessions.reregister(session, held_tokens, *self._worker)
        try:
            self._server = await self._heartbeat(session)
        except SessionLost as error:
            raise StoreUnavailable("Redis came back again during the registration; retry") from error
        self._session = session
        self._differing = set()
        kept = 0
        for answer in answers:
            active = self.trajectories.get(answer.trajectory_id)
            if active is None:
                continue
            if answer.kept:
                kept += 1
                saved = answer.saved_token_count
                if active.saved_token_count > saved_before[answer.trajectory_id]:
                    saved = max(saved, active.saved_token_count)  # a save was answered during the registration
                active.mark_registered(saved)
            else:
                active.lose("the queue stores other tokens of the trajectory, or another worker has leased it")
        self._log.warning("session_registered_again", held=len(held_tokens), kept=kept)

    async def _retry(self, action: Callable[[], Awaitable[R]], beats: Sequence[Beat]) -> R:
        """Retry until the store answers; ``beats`` are called after every failure."""

        async def wait(error: StoreUnavailable, pause: float) -> None:
            self._log.warning("store_unavailable", message=str(error), pause_seconds=pause)
            for beat in beats:
                beat()
            await asyncio.sleep(pause)

        return await retry(action, StoreUnavailable, _BACKOFF, wait)
