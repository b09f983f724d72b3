"""The trainer's fenced session: one trainer at a time, patient with a Redis that is down, honest to one that forgot.

Every change in the queue is idempotent, so a call that failed is repeated until it succeeds or the process is asked
to stop. When the server's run_id changes, Redis may have come back as an earlier state: the trainer then re-asserts
what has been trained, from the checkpoint store, before anything else.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, ConfigError, Conflict, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, RunLimits
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.types import Batch

T = TypeVar("T")

_FIRST_PAUSE_SECONDS = 0.1
_LONGEST_PAUSE_SECONDS = 5.0
_LOG_EVERY_SECONDS = 30.0


class Stopped(RollmeshError):
    """The process was asked to stop while it waited; everything so far is safe."""


class TrainingSession:
    """What the trainer says to the queue, and what it knows of its own progress."""

    def __init__(
        self,
        store: TrajectoryStore,
        checkpoints: CheckpointStore,
        shelf: PolicyCatalog,
        metrics: TrainerMetrics,
        shutdown: Shutdown,
    ) -> None:
        self.store = store
        self.token = ""
        """The session; empty until ``open``."""
        self.committed_step = 0
        """Train step of the newest committed state."""
        self.trained_step = 0
        """Newest train step that is trained on, or whose batch file precedes another one."""
        self._checkpoints = checkpoints
        self._shelf = shelf
        self._metrics = metrics
        self._shutdown = shutdown
        self._name = ""
        self._lineage = ""
        self._run_id = ""
        self._assertions = 0
        self._listed_version = -1
        """Policies up to this version have been read from the registry."""
        self._lock = asyncio.Lock()
        self._log = get_logger("session")

    @property
    def assertions(self) -> int:
        """How often Redis has been told what is trained: once at the start, and when it came back as another server."""
        return self._assertions

    async def open(self, name: str, limits: RunLimits) -> None:
        """Open the session: every older trainer is refused from now on.

        Raises ConfigError when the queue was filled for another checkpoint store: another run of the same name.
        """
        self._name = name
        self._lineage = await asyncio.to_thread(self._checkpoints.lineage)
        self._run_id = await self.patiently("server_run_id", self.store.server_run_id)
        await self.patiently("init_run", lambda: self.store.init_run(limits))
        try:
            self.token = await self.patiently("open_trainer_session", self._open_first)
        except Conflict as error:
            raise ConfigError(
                f"name: {self.store.connection.keys.run!r} on this Redis belongs to another run, whose checkpoints are "
                f"not those in {self._checkpoints.root}; choose another name, the folder of that run "
                "(checkpoints.folder), or another Redis database (store.url)"
            ) from error

    async def _open_first(self) -> str:
        return await self.store.open_trainer_session(self._name, lineage=self._lineage)

    async def begin(self, committed_step: int) -> None:
        """Tell Redis what the checkpoint store holds, and learn which policies exist.

        Every batch file but the last one was trained on, or is replayed before anything else happens.
        """
        steps = await asyncio.to_thread(self._checkpoints.batch_steps)
        self.committed_step = committed_step
        self.trained_step = max(committed_step, steps[-1] - 1 if steps else 0)
        self._shelf.update(await asyncio.to_thread(self._checkpoints.complete_policies, announced_only=True))
        await self.patiently("reassert_training", self._reassert)
        await self._refuse_older_checkpoints(max(committed_step, steps[-1] if steps else 0))
        await self.learn_policies()
        self._log.info(
            "session_opened", session=self.token, committed_step=committed_step, trained_step=self.trained_step
        )

    async def learn_policies(self) -> None:
        """Let the shelf know what has been announced since it was last asked to."""
        after = self._listed_version
        news = await self.patiently("policies", lambda: self.store.policies(after))
        self._shelf.update(news)
        self._listed_version = max((record.policy_version for record in news), default=after)

    async def _refuse_older_checkpoints(self, newest_step: int) -> None:
        """A queue that has let go of batches whose files are gone cannot bring them back: ConfigError."""
        known = (await self.patiently("training_state", self.store.training_state)).trained_step
        if known > newest_step:
            raise ConfigError(
                f"checkpoints.folder={self._checkpoints.root}: its newest batch file is of train step {newest_step}, "
                f"but the queue has seen step {known} trained: these checkpoints were restored from an older copy, or "
                "files were deleted. Restore newer ones, or delete the run's keys in Redis (embedded: the folder redis "
                "in the run folder) to go on from these"
            )

    async def close(self) -> None:
        """Give the session back, if Redis can be reached."""
        with contextlib.suppress(StoreUnavailable, SessionLost):
            await self.store.close_trainer_session(self.token)

    async def patiently(self, what: str, action: Callable[[], Awaitable[T]]) -> T:
        """Repeat an idempotent action while Redis is away; raises Stopped at shutdown, SessionLost when fenced."""
        pause, waiting_since, logged = _FIRST_PAUSE_SECONDS, time.monotonic(), 0.0
        while True:
            assertions = self._assertions
            try:
                return await action()
            except (StoreUnavailable, Conflict, SessionLost) as error:
                if await self._server_changed() or self._assertions != assertions:
                    continue
                if not isinstance(error, StoreUnavailable):
                    raise
                if time.monotonic() - logged > _LOG_EVERY_SECONDS:
                    logged = time.monotonic()
                    seconds = round(logged - waiting_since, 1)
                    self._log.warning("waiting_for_redis", what=what, seconds=seconds, message=str(error))
            if await wait_or_shutdown(self._shutdown, pause):
                raise Stopped(f"{what}: asked to stop while waiting for Redis")
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)

    async def claim(self, train_step: int, timeout: float) -> Batch | None:
        """The batch of a train step; None when it was not cut within ``timeout`` seconds, and at once at shutdown.

        To claim only reads, so a wait for the cut may be broken off.
        """
        claim = asyncio.ensure_future(
            self.patiently("claim", lambda: self.store.claim(self.token, train_step, timeout))
        )
        stopped = asyncio.ensure_future(self._shutdown.wait())
        try:
            await asyncio.wait({claim, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return claim.result() if claim.done() else None
        finally:
            claim.cancel()
            stopped.cancel()
            await asyncio.gather(claim, stopped, return_exceptions=True)

    async def watch(self, every_seconds: float) -> None:
        """Notice a restarted Redis even while a long step runs; ends at shutdown or raises SessionLost."""
        while not await wait_or_shutdown(self._shutdown, every_seconds):
            await self._server_changed()

    async def report_trained(self, train_step: int) -> None:
        """cut(s) -> consumed(s)."""
        self.trained_step = max(self.trained_step, train_step)
        await self.patiently("report_trained", lambda: self.store.report_trained(self.token, train_step))

    async def report_committed(self, train_step: int) -> None:
        """A trainer state has been committed."""
        self.committed_step = train_step
        await self.patiently("report_committed", lambda: self.store.report_committed(self.token, train_step))

    async def check(self) -> None:
        """Raise SessionLost when a newer trainer has taken over."""
        committed = self.committed_step
        await self.patiently("check_session", lambda: self.store.report_committed(self.token, committed))

    async def _server_changed(self) -> bool:
        """Whether Redis is another server than before; then it has been told what is trained."""
        async with self._lock:
            try:
                run_id = await self.store.server_run_id()
                if run_id == self._run_id:
                    return False
                self._log.warning("redis_restarted", run_id=run_id, before=self._run_id)
                if self.token:
                    # The restored state may be older than this session. A session that was fenced stays fenced.
                    await self.store.open_trainer_session(self._name, self.token, lineage=self._lineage)
                    await self._reassert()
            except StoreUnavailable:
                return False
            self._run_id = run_id
            return True

    async def _reassert(self) -> None:
        known = (await self.store.training_state()).trained_step
        found = [s for s in await asyncio.to_thread(self._checkpoints.batch_steps) if s <= self.trained_step + 1]
        # Files of steps that Redis knows as trained tell it nothing; the newest one has the cursor.
        steps = [s for s in found if s > known] or found[-1:]
        batches: list[tuple[int, list[str]]] = []
        digests: list[str] = []
        cursor = Cursor()
        for step in steps:
            try:
                footer = await asyncio.to_thread(self._checkpoints.batch_footer, step)
            except CheckpointError as error:
                self._log.warning("batch_file_refused", train_step=step, reason=error.reason, message=str(error))
                continue
            batches.append((step, footer.group_ids))
            digests.append(footer.payload_sha256)
            cursor = footer.cursor
        await self.store.reassert_training(
            self.token,
            committed_step=self.committed_step,
            trained_step=self.trained_step,
            batches=batches,
            policies=self._shelf.records,
            cursor=cursor,
            digests=digests,
            known_step=known,
        )
        self._assertions += 1
        self._metrics.reasserted.inc()
        self._log.info("training_reasserted", trained_step=self.trained_step, batch_files=len(batches))
