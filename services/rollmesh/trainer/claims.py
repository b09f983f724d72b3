"""Getting the batch of a train step: from its file when there is one, else from the queue, and then into its file."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.trainer.patience import Patience
from rollmesh.trainer.session import TrainingSession
from rollmesh.trainer.shelf import PolicyShelf
from rollmesh.types import Batch

_REWRITABLE = frozenset({Reason.MISSING, Reason.TORN, Reason.TRUNCATED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """A batch that is on disk and confirmed: it may be trained on."""

    batch: Batch
    digest: str
    replayed: bool
    """Whether the file was there already, from before a restart."""


class BatchClaims:
    """Batches in order; a batch reaches the trainer only once its file is on the device and Redis knows."""

    def __init__(
        self, session: TrainingSession, checkpoints: CheckpointStore, shelf: PolicyShelf, patience: Patience
    ) -> None:
        self._session = session
        self._checkpoints = checkpoints
        self._shelf = shelf
        self._patience = patience
        self._log = get_logger("claims")

    async def next(self, train_step: int, timeout: float) -> ClaimedBatch | None:
        """The batch of ``train_step``; None when it was not cut within ``timeout`` seconds.

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
            "confirm_batch_file", lambda: store.confirm_batch_file(token, step, claimed.digest, ids)
        )

    async def _learn_policies(self) -> None:
        self._shelf.update(await self._session.patiently("policies", self._session.store.policies))

    async def _from_file(self, train_step: int) -> ClaimedBatch | None:
        try:
            batch = await asyncio.to_thread(self._checkpoints.read_batch, train_step)
            footer = await asyncio.to_thread(self._checkpoints.batch_footer, train_step)
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
        await self._learn_policies()
        self._shelf.remember(footer.version_train_steps)
        return ClaimedBatch(batch=batch, digest=footer.payload_sha256, replayed=True)

    async def _from_queue(self, train_step: int, timeout: float) -> ClaimedBatch | None:
        store, token = self._session.store, self._session.token
        started_ns, home = time.time_ns(), tracer().train_step(train_step)
        batch = await self._session.patiently("claim", lambda: store.claim(token, train_step, timeout))
        if batch is None:
            return None
        tracer().span("claim", home, kind="client", start_ns=started_ns, groups=len(batch.groups)).end()
        cursor = await self._session.patiently("cursor", store.cursor)
        await self._learn_policies()
        train_steps = self._shelf.train_steps
        with tracer().span("write_batch", home):
            digest = await self._patience.with_room(
                "write_batch", lambda: asyncio.to_thread(self._checkpoints.write_batch, batch, cursor, train_steps)
            )
        return ClaimedBatch(batch=batch, digest=digest, replayed=False)
