"""The end of a stage: what the old-logprob source ``stage_end`` needs before the weights change.

At the barrier no rollout runs. Tokens that the present weights have just sampled, in trajectories that go on after
the update, are scored now, because these weights are gone afterwards.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Executor

from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.store import SavedTokens
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Batch

_POLL_SECONDS = 0.05
_PARKING_SECONDS = 30.0


class StageEnds:
    """Records log-probabilities of unfinished work at each barrier."""

    def __init__(self, crew: RankCoordinator, session: TrainingSession, executor: Executor, shutdown: Shutdown) -> None:
        self._crew = crew
        self._session = session
        self._executor = executor
        self._shutdown = shutdown
        self._seen: dict[str, SavedTokens] = {}
        """Unfinished work of the newest stage that was recorded."""
        self._log = get_logger("stages")

    async def record(self, batch: Batch) -> int:
        """Score what has been generated since the last stage and is not in ``batch``; returns how many trajectories.

        Nothing is recorded during a replay, when newer policies exist already: those tokens are not of these weights.
        """
        newest = self._crew.shelf.newest
        if newest is None or newest.train_step != self._crew.trainer.train_step:
            return 0
        await self._until_parked()
        store, seen = self._session.store, self._seen
        unclaimed = await self._session.patiently("unclaimed_trajectories", lambda: store.unclaimed_trajectories(seen))
        in_batch = {t.trajectory_id for g in batch.groups for t in g.trajectories}
        others = {i: saved for i, saved in unclaimed.items() if i not in in_batch}
        # By id: after a restart the same ones are packed, and so rounded, in the same way.
        changed = [others[i].trajectory for i in sorted(others) if others[i] is not seen.get(i)]
        kept = in_batch | others.keys()
        loop = asyncio.get_running_loop()
        recorded = await loop.run_in_executor(self._executor, self._crew.end_stage, changed, kept)
        self._seen = others
        return recorded

    async def _until_parked(self) -> None:
        """Wait until no rollout runs; what a worker has not saved by then falls back to the sampler's logprobs."""
        deadline = time.monotonic() + _PARKING_SECONDS
        while (leased := (await self._session.patiently("view", self._session.store.view)).leased) > 0:
            if time.monotonic() > deadline:
                self._log.warning("rollouts_still_run_at_the_barrier", leased=leased, seconds=_PARKING_SECONDS)
                return
            if await wait_or_shutdown(self._shutdown, _POLL_SECONDS):
                return
