"""Parts of the next batch: the trainer computes the gradient of ready groups while it waits for the cut."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Executor
from contextlib import asynccontextmanager

from rollmesh.errors import CheckpointError
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.scheduling import Schedule
from rollmesh.segments import join_group
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Group

_POLL_SECONDS = 0.25
_RETRY_SECONDS = 5.0


class PartSource:
    """Source of parts. It only reads the queue; batch file and confirmation still come before the optimizer step."""

    def __init__(
        self,
        ranks: RankCoordinator,
        session: TrainingSession,
        executor: Executor,
        shutdown: Shutdown,
        schedule: Schedule,
    ) -> None:
        self._ranks = ranks
        self._session = session
        self._executor = executor
        self._shutdown = shutdown
        self._groups = schedule.part_groups
        self._batch = schedule.groups_per_batch
        self.seconds = 0.0
        """Wall time of the passes of the newest block."""
        self._pass: asyncio.Future[bool] | None = None
        """Newest pass over a part; it runs in the executor's only thread."""
        self._log = get_logger("part_source")

    @asynccontextmanager
    async def accumulating(self, train_step: int) -> AsyncIterator[None]:
        """Accumulate parts of a batch within the block, which waits for its cut; raises the error of a pass.

        A pass that runs when the cut arrives is awaited: if it fails on one rank, all ranks must end.
        """
        self.seconds = 0.0
        if not self._groups:
            yield
            return
        task = asyncio.create_task(self._accumulate(train_step), name="accumulate-parts")
        try:
            yield
        finally:
            raise_first_error(await cancel_and_wait(task))
        if self._pass is not None:
            await self._pass

    async def _accumulate(self, train_step: int) -> None:
        self._pass = None
        while not self._shutdown.is_set():
            known = self._ranks.trainer.accumulated_group_ids
            if len(known) == self._batch:
                return
            groups = await self._ready_groups(train_step, known)
            if not groups:
                await wait_or_shutdown(self._shutdown, _POLL_SECONDS)
                continue
            await self._session.learn_policies()
            self._pass = asyncio.get_running_loop().run_in_executor(self._executor, self._pass_over, groups)
            if not await asyncio.shield(self._pass):
                await wait_or_shutdown(self._shutdown, _RETRY_SECONDS)

    def _pass_over(self, groups: Sequence[Group]) -> bool:
        """Add a part; return False, without any part, if a policy that it reads cannot be read at the moment."""
        started = time.monotonic()
        try:
            self._ranks.accumulate([join_group(group) for group in groups])
        except CheckpointError as error:
            # Other ranks may be inside the pass, and end when this one fails.
            if not error.passing or self._ranks.world.size > 1:
                raise
            self._log.warning("part_waits", reason=error.reason, message=str(error))
            return False
        finally:
            self.seconds += time.monotonic() - started
        trainer = self._ranks.trainer
        self._log.info("part_accumulated", train_step=trainer.train_step + 1, groups=len(trainer.accumulated_group_ids))
        return True

    async def _ready_groups(self, train_step: int, known: frozenset[str]) -> list[Group]:
        training, token = self._session.store.training, self._session.token
        return await self._session.retry(
            "ready_groups", lambda: training.ready_groups(token, train_step, self._groups, known)
        )
