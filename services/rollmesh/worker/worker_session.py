"""The worker's session with the trajectory queue: opened, kept alive, and replaced without losing what is held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

from rollmesh.errors import SessionLost, StoreUnavailable
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.trajectory_metrics import TrajectoryMetrics

R = TypeVar("R")
Beat = Callable[[], None]
"""Tells the watch of one loop that it is alive. Only what that loop itself waits for may call it."""

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 2.0


class WorkerSession:
    """Current session id, heartbeat, and recovery.

    A session ends when its heartbeat was late (a stalled process) and is void when Redis came back as an earlier
    state. Either way the worker states what it holds; the queue says what it may keep and from which token on to save.
    """

    def __init__(
        self, store: TrajectoryStore, worker: str, heartbeat_seconds: float, metrics: TrajectoryMetrics
    ) -> None:
        self._store = store
        self._worker = worker
        self._heartbeat_seconds = heartbeat_seconds
        self._metrics = metrics
        self._log = get_logger("session")
        self._lock = asyncio.Lock()
        self._differing: set[str] = set()
        """Trajectories that only one of the queue and this worker counted as held here at the last heartbeat."""
        self.leasing = asyncio.Lock()
        """Taken from asking for a lease until its trajectories are in ``held``; nothing is compared meanwhile."""
        self._session = ""
        self._server = ""
        self.held: dict[str, ActiveTrajectory] = {}
        """Everything this worker holds, finished ones that wait for their reward included."""
        self.registrations = 0
        """How often everything held was registered; what was leased before a registration and is not in ``held`` yet
        has been given back by it."""
        self._waiting: list[Beat] = []
        """Beats of the loops that wait for the recovery in progress."""

    @property
    def current(self) -> str:
        """Session id; empty before ``open``."""
        return self._session

    async def open(self) -> None:
        """Open the first session."""
        self._session = await self._store.open_session(self._worker)
        self._server = await self._store.heartbeat(self._session)

    async def close(self) -> None:
        """Give back whatever is still held."""
        if self._session:
            await self._store.close_session(self._session)
            self._session = ""

    async def keep_alive(self, beat: Beat) -> None:
        """Heartbeat until cancelled; ``beat`` is called after each round, and during an outage that it waits out."""
        while True:
            started = time.monotonic()
            session = self._session
            try:
                server = await self._store.heartbeat(session)
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
        """Run a store operation under the current session until it gets an answer.

        A lost session is replaced, an outage is waited out: tokens stay in memory meanwhile.
        """
        pause = _FIRST_PAUSE_SECONDS
        while True:
            session = self._session
            try:
                return await operation(session)
            except SessionLost:
                await self.recover(session, beat=beat)
            except StoreUnavailable as error:
                pause = await self._outlast(error, pause, [beat] if beat else [])

    async def confirm(self) -> None:
        """Make sure that the session lives: a write that was refused may mean that it does not."""
        server = await self.call(self._store.heartbeat)
        if server != self._server:
            await self.recover(self._session, server)

    async def recover(self, lost: str, server: str | None = None, *, beat: Beat | None = None) -> None:
        """Replace session ``lost`` (or confirm it to a new server) and register everything held."""
        async with self._recovery(beat):
            if self._session != lost or (server is not None and server == self._server):
                return  # another task has done it
            session = lost
            if server is None:
                self._metrics.sessions_lost.inc()
                session = await self._retrying(lambda: self._store.open_session(self._worker))
            await self._retrying(lambda: self._register(session))

    async def _compare(self, session: str, beat: Beat) -> None:
        """Register everything again when the queue has differed about a trajectory at two heartbeats in a row.

        At a single heartbeat they may differ: a release or a score that the queue has done is not answered yet.
        """
        if self.leasing.locked():
            return
        async with self.leasing:
            before = self._differing
            self._differing = await self._store.held_by(session) ^ self.held.keys()
            if not before & self._differing:
                return
            async with self._recovery(beat):
                if self._session == session:
                    self._log.warning("leases_differ", trajectories=sorted(before & self._differing))
                    await self._retrying(lambda: self._register(session))

    @asynccontextmanager
    async def _recovery(self, beat: Beat | None) -> AsyncIterator[None]:
        """Recover alone; ``beat`` is called in outages, also while another task recovers."""
        beats = [beat] if beat else []
        self._waiting += beats
        try:
            async with self._lock:
                yield
        finally:
            for each in beats:
                self._waiting.remove(each)

    async def _register(self, session: str) -> None:
        """Take everything held along into ``session``, which is nobody's before: a lease under it could bring a
        trajectory that a task here is still writing."""
        self.registrations += 1
        saved_before = {held.trajectory_id: held.saved_token_count for held in self.held.values()}
        stated = [held.stated() for held in self.held.values()]
        try:
            answers = await self._store.reregister(session, stated, self._worker)
        except SessionLost:
            session = await self._store.open_session(self._worker)
            answers = await self._store.reregister(session, stated, self._worker)
        self._server = await self._store.heartbeat(session)
        self._session = session
        self._differing = set()
        kept = 0
        for answer in answers:
            held = self.held.get(answer.trajectory_id)
            if held is None:
                continue
            if answer.kept:
                kept += 1
                held.first_token_reported = False  # Redis may have come back from before the report
                saved = answer.saved_token_count
                if held.saved_token_count > saved_before[answer.trajectory_id]:
                    saved = max(saved, held.saved_token_count)  # a save was answered between the two
                held.saved_token_count = min(saved, held.token_count)
            else:
                held.lose("the queue has other tokens of the trajectory, or has given it to another worker")
        self._log.warning("session_registered_again", held=len(stated), kept=kept)

    async def _retrying(self, operation: Callable[[], Awaitable[R]]) -> R:
        pause = _FIRST_PAUSE_SECONDS
        while True:
            try:
                return await operation()
            except StoreUnavailable as error:
                pause = await self._outlast(error, pause, self._waiting)

    async def _outlast(self, error: StoreUnavailable, pause: float, beats: Sequence[Beat]) -> float:
        """Wait before the next attempt; returns the pause after that one."""
        self._log.warning("store_unavailable", message=str(error), pause_seconds=pause)
        for beat in beats:
            beat()
        await asyncio.sleep(pause)
        return min(2 * pause, _LONGEST_PAUSE_SECONDS)
