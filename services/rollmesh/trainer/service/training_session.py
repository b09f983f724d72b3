"""The trainer's fenced session: one trainer at a time, with retries and re-assertion after a Redis restart.

Every change in the queue is idempotent, so a failed call is retried until it succeeds or the process shuts down. If the
server's run_id changes, Redis may have been restored to an earlier state. The trainer then re-asserts the trained steps
from the checkpoint store before any other call.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.errors import CheckpointError, ConfigError, Conflict, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, RunLimits
from rollmesh.prompt_history import PromptOutcome
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.runtime.tasks import Backoff, cancel_and_wait, retry
from rollmesh.store import TrajectoryStore
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_metrics import TrainerMetrics
from rollmesh.types import Batch, PolicyRecord

T = TypeVar("T")

_BACKOFF = Backoff(first_seconds=0.1, longest_seconds=5.0)
_LOG_EVERY_SECONDS = 30.0
LOOP_NAME = "train"
"""Name of the training loop in the health of the process. It beats in every wait, also for days."""


class Stopped(RollmeshError):
    """Shutdown of the process during a wait; all completed work is safe."""


@dataclass(eq=False)
class TrainingSession:
    """The trainer's calls to the queue, and its own record of the progress."""

    store: TrajectoryStore
    _checkpoints: CheckpointStore
    _catalog: PolicyCatalog
    _metrics: TrainerMetrics
    _shutdown: Shutdown
    _health: Health = field(default_factory=Health)
    token: str = field(default="", init=False)
    """Session token; empty until ``open``."""
    committed_step: int = field(default=0, init=False)
    """Train step of the newest committed state."""
    trained_step: int = field(default=0, init=False)
    """Newest train step that is trained, or whose batch file is followed by another one."""
    assertions: int = field(default=0, init=False)
    """Number of re-assertions of the training state: one at startup, and one per Redis restart."""
    run_id: str = field(default="", init=False)
    """run_id of the Redis server that has the training state; empty during a re-assertion."""
    _name: str = field(default="", init=False)
    _lineage: str = field(default="", init=False)
    _listed_version: int = field(default=-1, init=False)
    """Newest policy version that was read from the registry."""
    _lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    _log: Logger = field(default_factory=lambda: get_logger("session"), init=False)

    async def open(self, name: str, limits: RunLimits) -> None:
        """Open the session, which fences older trainers. Raises ConfigError if the queue belongs to another run."""
        self._name = name
        self._lineage = await asyncio.to_thread(self._checkpoints.lineage)
        self.run_id = await self.retry("server_run_id", self.store.recovery.server_run_id)
        await self.retry("init_run", lambda: self.store.limits.init_run(limits))
        try:
            self.token = await self.retry(
                "open_trainer_session", lambda: self.store.training.open_session(name, lineage=self._lineage)
            )
        except Conflict as error:
            raise ConfigError(
                f"name: {self.store.connection.keys.run!r} on this Redis belongs to another run, whose checkpoints are "
                f"not in {self._checkpoints.root}; choose another name, the folder of that run (checkpoints.folder), "
                "or another Redis database (store.url)"
            ) from error

    async def begin(self, committed_step: int) -> None:
        """Send the contents of the checkpoint store to Redis, and read the policy registry.

        Every batch file but the newest was trained on, or is replayed before any other work. Raises ConfigError if the
        queue has dropped batches whose files are missing: they cannot be restored.
        """
        steps = await asyncio.to_thread(self._checkpoints.batch_steps)
        self.committed_step = committed_step
        self.trained_step = max(committed_step, steps[-1] - 1 if steps else 0)
        self._catalog.update(await asyncio.to_thread(self._checkpoints.complete_policies, announced_only=True))
        await self.retry("reassert_training", self._reassert)
        known, newest = (await self.retry("training_state", self.store.training.state)).trained_step, max([0, *steps])
        if known > max(committed_step, newest):
            raise ConfigError(
                f"checkpoints.folder={self._checkpoints.root}: its newest batch file is of train step {newest}, "
                f"but the queue has recorded step {known} as trained: these checkpoints were restored from an older "
                "copy, or files were deleted. Restore newer checkpoints, or delete the run's keys in Redis (embedded: "
                "the folder redis in the run folder) to continue from these"
            )
        await self.learn_policies()
        self._log.info(
            "session_opened", session=self.token, committed_step=committed_step, trained_step=self.trained_step
        )

    async def learn_policies(self) -> None:
        """Add the policies that were announced since the last call to the catalog."""
        after = self._listed_version
        records = await self.retry("policies", lambda: self.store.policies.announced(after))
        self._catalog.update(records)
        self._listed_version = max((record.policy_version for record in records), default=after)

    async def newest_policy(self) -> PolicyRecord | None:
        """Return the newest policy of the registry; one that Redis has forgotten is sent to it again before."""

        async def latest() -> PolicyRecord | None:
            newest, known = await self.store.policies.latest(), self._catalog.newest
            if known is not None and (newest is None or newest.policy_version < known.policy_version):
                # ``retry`` looks whether Redis has come back with an older file, and sends the policies again.
                raise Conflict(f"policy version {known.policy_version} was announced, but Redis does not know it")
            return newest

        return await self.retry("latest_policy", latest)

    async def close(self) -> None:
        """Release the session, unless Redis is unreachable."""
        with contextlib.suppress(StoreUnavailable, SessionLost):
            await self.store.training.close_session(self.token)

    def beat(self) -> None:
        """Report to the liveness probe that the training loop waits on purpose."""
        self._health.beat(LOOP_NAME)

    async def retry(self, operation: str, action: Callable[[], Awaitable[T]]) -> T:
        """Retry an idempotent action while Redis is unreachable. Raises Stopped at shutdown, SessionLost if fenced."""
        waiting_since, logged = time.monotonic(), 0.0

        async def attempt() -> T:
            while True:
                assertions = self.assertions
                try:
                    return await action()
                except (StoreUnavailable, Conflict, SessionLost):
                    if not await self._server_changed() and self.assertions == assertions:
                        raise

        async def wait(error: StoreUnavailable, pause: float) -> None:
            nonlocal logged
            self.beat()
            if time.monotonic() - logged > _LOG_EVERY_SECONDS:
                logged = time.monotonic()
                seconds = round(logged - waiting_since, 1)
                self._log.warning("waiting_for_redis", what=operation, seconds=seconds, message=str(error))
            if await wait_or_shutdown(self._shutdown, pause):
                raise Stopped(f"{operation}: shut down while waiting for Redis")

        return await retry(attempt, StoreUnavailable, _BACKOFF, wait)

    async def claim(self, train_step: int, timeout: float) -> Batch | None:
        """Claim the batch of a step, by reading only; None after ``timeout`` seconds, and at shutdown."""
        claim = asyncio.ensure_future(
            self.retry("claim", lambda: self.store.training.claim(self.token, train_step, timeout))
        )
        stopped = asyncio.ensure_future(self._shutdown.wait())
        try:
            await asyncio.wait({claim, stopped}, return_when=asyncio.FIRST_COMPLETED)
            return claim.result() if claim.done() else None
        finally:
            await cancel_and_wait(claim, stopped)

    async def watch(self, every_seconds: float) -> None:
        """Watch for a Redis restart, also during a long step, until shutdown. Raises SessionLost if fenced."""
        while not await wait_or_shutdown(self._shutdown, every_seconds):
            with contextlib.suppress(StoreUnavailable):
                await self._server_changed()

    async def report_trained(self, train_step: int) -> None:
        """Report a train step as trained: cut(s) -> consumed(s)."""
        self.trained_step = max(self.trained_step, train_step)
        await self.retry("report_trained", lambda: self.store.training.report_trained(self.token, train_step))

    async def report_committed(self, train_step: int) -> None:
        """Report that the trainer state of a step is committed."""
        self.committed_step = train_step
        await self.retry("report_committed", lambda: self.store.training.report_committed(self.token, train_step))

    async def check(self) -> None:
        """Raise SessionLost if a newer trainer has taken over."""
        committed = self.committed_step
        await self.retry("check_session", lambda: self.store.training.report_committed(self.token, committed))

    async def _server_changed(self) -> bool:
        """Tell whether Redis has restarted, and re-assert then; raises StoreUnavailable while that is not possible."""
        async with self._lock:
            run_id = await self.store.recovery.server_run_id()
            if run_id == self.run_id:
                return False
            self._log.warning("redis_restarted", run_id=run_id, before=self.run_id)
            if self.token:
                # Until the end of the re-assertion no server has it, not even the one before, should that come back.
                self.run_id = ""
                await self._open_and_reassert(run_id)
            self.run_id = run_id
            return True

    async def _open_and_reassert(self, run_id: str) -> None:
        try:
            # The restored state may be older than this session. A fenced session stays fenced.
            await self.store.training.open_session(self._name, self.token, lineage=self._lineage)
            await self._reassert()
        except SessionLost as error:
            if await self.store.recovery.server_run_id() == run_id:
                raise
            raise StoreUnavailable("Redis came back again during the re-assertion; retry") from error
        except CheckpointError as error:
            if not error.passing:
                raise
            self._log.warning("reassertion_waits", message=str(error))
            raise StoreUnavailable(f"the batch files cannot be read for now: {error}") from error

    async def _reassert(self) -> None:
        known = (await self.store.training.state()).trained_step
        found = [s for s in await asyncio.to_thread(self._checkpoints.batch_steps) if s <= self.trained_step + 1]
        # Redis needs no files of steps that it counts as trained; the newest file has the cursor.
        steps = [s for s in found if s > known] or found[-1:]
        batches: list[tuple[int, list[str]]] = []
        digests: list[str] = []
        outcomes: list[list[PromptOutcome]] = []
        cursor = Cursor()
        for step in steps:
            try:
                footer = await asyncio.to_thread(self._checkpoints.batch_footer, step)
            except CheckpointError as error:
                if error.outside:  # without this file its groups would be admitted again
                    raise
                self._log.warning("batch_file_refused", train_step=step, reason=error.reason, message=str(error))
                continue
            batches.append((step, footer.group_ids))
            digests.append(footer.payload_sha256)
            outcomes.append(footer.outcomes)
            cursor = footer.cursor
        await self.store.training.reassert(
            self.token,
            committed_step=self.committed_step,
            trained_step=self.trained_step,
            batches=batches,
            policies=self._catalog.records,
            cursor=cursor,
            digests=digests,
            known_step=known,
            outcomes=outcomes,
        )
        self.assertions += 1
        self._metrics.reasserted.inc()
        self._log.info("training_reasserted", trained_step=self.trained_step, batch_files=len(batches))
