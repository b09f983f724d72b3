"""End of a stage: scores that the old-logprob source ``stage_end`` requires before the weights change.

No rollout runs at the barrier. The trainer scores the tokens that the current weights sampled in trajectories that
continue after the update, because the update replaces these weights.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor
from dataclasses import dataclass, field

from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.store import SavedTokens
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Batch

_POLL_SECONDS = 0.05
_IDLE_TIMEOUT_SECONDS = 30.0


@dataclass(eq=False)
class StageEnds:
    """Recorder of log-probabilities of unfinished trajectories, at each barrier."""

    _ranks: RankCoordinator
    _session: TrainingSession
    _executor: Executor
    _shutdown: Shutdown
    _seen: dict[str, SavedTokens] = field(default_factory=dict, init=False)
    """Unfinished trajectories of the last recorded stage."""
    _log: Logger = field(default_factory=lambda: get_logger("stages"), init=False)

    async def record(self, batch: Batch) -> int:
        """Score the tokens since the last stage that are not in ``batch``; return the number of trajectories.

        A replay records nothing: newer policies exist, and the new tokens were not sampled by the current weights.
        """
        newest = self._ranks.catalog.newest
        if newest is None or newest.train_step != self._ranks.trainer.train_step:
            return 0
        await self._wait_until_idle()
        store, seen = self._session.store, self._seen
        unclaimed = await self._session.retry("unclaimed_trajectories", lambda: store.unclaimed.read(seen))
        in_batch = {t.trajectory_id for g in batch.groups for t in g.trajectories}
        unfinished = {i: saved for i, saved in unclaimed.items() if i not in in_batch}
        # Sorted by id: after a restart the same trajectories are packed, and rounded, in the same way.
        changed = [unfinished[i].trajectory for i in sorted(unfinished) if unfinished[i] is not seen.get(i)]
        kept = in_batch | unfinished.keys()
        loop = asyncio.get_running_loop()
        recorded = await loop.run_in_executor(self._executor, self._ranks.end_stage, changed, kept)
        self._seen = unfinished
        return recorded

    async def _wait_until_idle(self) -> None:
        """Wait until no rollout runs. Tokens that are not saved by then fall back to the sampler's logprobs."""
        deadline = time.monotonic() + _IDLE_TIMEOUT_SECONDS
        while (leased := (await self._session.retry("view", self._session.store.mesh.view)).leased) > 0:
            if time.monotonic() > deadline:
                self._log.warning("rollouts_still_run_at_the_barrier", leased=leased, seconds=_IDLE_TIMEOUT_SECONDS)
                return
            if await wait_or_shutdown(self._shutdown, _POLL_SECONDS):
                return
