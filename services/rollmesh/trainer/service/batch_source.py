"""Getting the batch of a train step: from its file when there is one, else from the queue, and then into its file."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from rollmesh.checkpoints.batches import StepSettings, StoredBatch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.segments import join_segments
from rollmesh.trainer.learner.step_settings import differing_settings
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.trainer.service.write_retry import Retry
from rollmesh.types import Batch, Group

_REWRITABLE = frozenset({Reason.MISSING, Reason.TORN, Reason.TRUNCATED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """A batch as its file has it, which is on disk and confirmed: it may be trained on."""

    stored: StoredBatch
    replayed: bool
    """Whether the file was there already, from before a restart."""

    @property
    def batch(self) -> Batch:
        """The groups to train on."""
        return self.stored.batch

    @property
    def settings(self) -> StepSettings | None:
        """Settings to train with; None takes the run file's (a file of an older version)."""
        return self.stored.footer.settings


class BatchSource:
    """Batches in order; a batch reaches the trainer only once its file is on the device and Redis knows."""

    def __init__(
        self,
        session: TrainingSession,
        checkpoints: CheckpointStore,
        shelf: PolicyCatalog,
        patience: Retry,
        settings: Callable[[int], StepSettings],
    ) -> None:
        """``settings`` gives those of the run file for a train step."""
        self._settings = settings
        self._session = session
        self._checkpoints = checkpoints
        self._shelf = shelf
        self._patience = patience
        self._log = get_logger("claims")

    async def next(self, train_step: int, timeout: float) -> ClaimedBatch | None:
        """The batch of ``train_step``; None when it was not cut within ``timeout`` seconds or the process is to stop.

        Raises CheckpointError when a step that Redis counts as trained has lost its batch file: it cannot be replayed.
        """
        claimed = await self._from_file(train_step)
        if claimed is None:
            claimed = await self._from_queue(train_step, timeout)
        if claimed is not None:
            await self._confirm(claimed)
        return claimed

    async def _confirm(self, claimed: ClaimedBatch) -> None:
        store, token = self._session.store, self._session.token
        step, ids = claimed.batch.train_step, [g.group_id for g in claimed.batch.groups]
        await self._session.patiently(
            "confirm_batch_file",
            lambda: store.confirm_batch_file(token, step, claimed.stored.footer.payload_sha256, ids),
        )

    async def _from_file(self, train_step: int) -> ClaimedBatch | None:
        try:
            stored = await asyncio.to_thread(self._checkpoints.stored_batch, train_step)
        except CheckpointError as error:
            if train_step <= self._session.trained_step:
                raise CheckpointError(
                    f"train step {train_step} has been trained on before, but cannot be replayed: {error}",
                    reason=error.reason,
                ) from error
            if error.reason not in _REWRITABLE:
                raise
            if error.reason != Reason.MISSING:
                self._log.warning("batch_file_torn", train_step=train_step, message=str(error))
            return None
        await self._session.learn_policies()
        self._shelf.remember(stored.footer.version_train_steps)
        self._log_other_settings(train_step, stored.footer.settings)
        return ClaimedBatch(stored=stored, replayed=True)

    def _log_other_settings(self, train_step: int, recorded: StepSettings | None) -> None:
        if recorded is None or recorded.recipe is None:
            self._log.warning("replay_without_recorded_settings", train_step=train_step)
        if differing := differing_settings(recorded, self._settings(train_step)):
            self._log.warning("replay_keeps_its_settings", train_step=train_step, differing=differing)

    async def _from_queue(self, train_step: int, timeout: float) -> ClaimedBatch | None:
        store = self._session.store
        started_ns, home = time.time_ns(), tracer().train_step(train_step)
        found = await self._session.claim(train_step, timeout)
        if found is None:
            return None
        batch = await asyncio.to_thread(_joined, found)
        tracer().span("claim", home, kind="client", start_ns=started_ns, groups=len(batch.groups)).end()
        cursor = await self._session.patiently("cursor", store.cursor)
        await self._session.learn_policies()
        train_steps, settings = self._shelf.train_steps, self._settings(train_step)

        def write() -> StoredBatch:
            # Read back: a trainer that was superseded may have written the file in between, with other content.
            self._checkpoints.write_batch(batch, cursor, train_steps, settings)
            return self._checkpoints.stored_batch(train_step)

        async def write_unless_superseded() -> StoredBatch:
            # A trainer that was stopped since its claim may wake up behind another one, which has rolled the run back.
            await self._session.check()
            return await asyncio.to_thread(write)

        with tracer().span("write_batch", home):
            stored = await self._patience.with_room("write_batch", write_unless_superseded)
        self._shelf.remember(stored.footer.version_train_steps)
        return ClaimedBatch(stored=stored, replayed=False)


def _joined(batch: Batch) -> Batch:
    """The batch with one segment for what one policy version wrote in several partial saves."""

    def joined(group: Group) -> Group:
        trajectories = tuple(replace(t, segments=join_segments(t.segments)) for t in group.trajectories)
        return replace(group, trajectories=trajectories)

    return replace(batch, groups=tuple(joined(group) for group in batch.groups))
