"""Passes before the update of a batch: over parts of it while its cut is awaited, and over what continues after it."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial

from rollmesh.errors import CheckpointError
from rollmesh.runtime.lifecycle import wait_or_shutdown
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.runtime.tasks import cancel_and_wait, raise_first_error
from rollmesh.segments import join_group
from rollmesh.store import SavedTokens
from rollmesh.trainer.service.leading_rank import LeadingRank
from rollmesh.types import Batch, Group

_POLL_SECONDS = 0.25
_RETRY_SECONDS = 5.0


@dataclass(eq=False)
class PartSource:
    """Source of parts. It only reads the queue; batch file and confirmation still come before the optimizer step."""

    _rank: LeadingRank
    seconds: float = field(default=0.0, init=False)
    """Wall time of the passes of the newest block."""
    _pass: asyncio.Future[bool] | None = field(default=None, init=False)
    """Newest pass over a part; it runs in the executor's only thread."""
    _log: Logger = field(default_factory=lambda: get_logger("part_source"), init=False)

    @asynccontextmanager
    async def accumulating(self, train_step: int) -> AsyncIterator[None]:
        """Accumulate parts within the block, which waits for the cut; raises the error of a pass."""
        self.seconds = 0.0
        if not self._rank.schedule.part_groups:
            yield
            return
        task = asyncio.create_task(self._accumulate(train_step), name="accumulate-parts")
        try:
            yield
        finally:
            raise_first_error(await cancel_and_wait(task))
        if self._pass is not None:  # if it fails on one rank, all ranks must end
            await self._pass

    async def _accumulate(self, train_step: int) -> None:
        self._pass, session, schedule = None, self._rank.session, self._rank.schedule
        while not self._rank.shutdown.is_set():
            known = self._rank.ranks.trainer.accumulated_group_ids
            if len(known) == schedule.groups_per_batch:
                return
            read = partial(session.store.training.ready_groups, session.token, train_step, schedule.part_groups, known)
            groups = await session.retry("ready_groups", read)
            if not groups:
                await wait_or_shutdown(self._rank.shutdown, _POLL_SECONDS)
                continue
            await session.learn_policies()
            self._pass = asyncio.get_running_loop().run_in_executor(self._rank.executor, self._pass_over, groups)
            if not await asyncio.shield(self._pass):
                await wait_or_shutdown(self._rank.shutdown, _RETRY_SECONDS)

    def _pass_over(self, groups: Sequence[Group]) -> bool:
        """Add a part; return False, without any part, if a policy that it reads cannot be read at the moment."""
        started = time.monotonic()
        try:
            self._rank.ranks.accumulate([join_group(group) for group in groups])
        except CheckpointError as error:
            # Other ranks may be inside the pass, and end when this one fails.
            if not error.passing or self._rank.ranks.world.size > 1:
                raise
            self._log.warning("part_waits", reason=error.reason, message=str(error))
            return False
        finally:
            self.seconds += time.monotonic() - started
        trainer = self._rank.ranks.trainer
        self._log.info("part_accumulated", train_step=trainer.train_step + 1, groups=len(trainer.accumulated_group_ids))
        return True


_IDLE_POLL_SECONDS = 0.05
_IDLE_TIMEOUT_SECONDS = 30.0


@dataclass(eq=False)
class StageEnds:
    """Recorder of log-probabilities of unfinished trajectories, at each barrier."""

    _rank: LeadingRank
    _seen: dict[str, SavedTokens] = field(default_factory=dict, init=False)
    """Unfinished trajectories of the last recorded stage."""
    _log: Logger = field(default_factory=lambda: get_logger("stages"), init=False)

    async def record(self, batch: Batch) -> int:
        """Score the tokens since the last stage that are not in ``batch``; return the number of trajectories."""
        newest = self._rank.ranks.catalog.newest
        if newest is None or newest.train_step != self._rank.ranks.trainer.train_step:
            return 0
        store, seen, deadline = self._rank.session.store, self._seen, time.monotonic() + _IDLE_TIMEOUT_SECONDS
        # Until no rollout runs: tokens that are not saved by then fall back to the sampler's logprobs.
        while (leased := (await self._rank.session.retry("view", store.mesh.view)).leased) > 0:
            if time.monotonic() > deadline:
                self._log.warning("rollouts_still_run_at_the_barrier", leased=leased, seconds=_IDLE_TIMEOUT_SECONDS)
                break
            if await wait_or_shutdown(self._rank.shutdown, _IDLE_POLL_SECONDS):
                break
        unclaimed = await self._rank.session.retry("unclaimed_trajectories", lambda: store.unclaimed.read(seen))
        in_batch = {t.trajectory_id for g in batch.groups for t in g.trajectories}
        unfinished = {i: saved for i, saved in unclaimed.items() if i not in in_batch}
        # Sorted by id: after a restart the same trajectories are packed, and rounded, in the same way.
        changed = [unfinished[i].trajectory for i in sorted(unfinished) if unfinished[i] is not seen.get(i)]
        kept = in_batch | unfinished.keys()
        recorded = await self._rank.in_torch(lambda: self._rank.ranks.end_stage(changed, kept))
        self._seen = unfinished
        return recorded
