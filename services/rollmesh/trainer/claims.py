"""Getting the batch of a train step: from its file when there is one, else from the queue, and then into its file."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from rollmesh.checkpoints.batches import BatchFooter, StepSettings
from rollmesh.checkpoints.reasons import Reason
from rollmesh.checkpoints.store import CheckpointStore
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.segments import join_segments
from rollmesh.trainer.optimizer import learning_rate
from rollmesh.trainer.patience import Patience
from rollmesh.trainer.session import TrainingSession
from rollmesh.trainer.shelf import PolicyShelf
from rollmesh.types import Batch, Group

_REWRITABLE = frozenset({Reason.MISSING, Reason.TORN, Reason.TRUNCATED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """A batch that is on disk and confirmed: it may be trained on."""

    batch: Batch
    digest: str
    settings: StepSettings | None
    """What to train it with; None as the run file says (a file of an older version)."""
    replayed: bool
    """Whether the file was there already, from before a restart."""


class BatchClaims:
    """Batches in order; a batch reaches the trainer only once its file is on the device and Redis knows."""

    def __init__(
        self,
        session: TrainingSession,
        checkpoints: CheckpointStore,
        shelf: PolicyShelf,
        patience: Patience,
        config: TrainerConfig,
    ) -> None:
        self._config = config
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
            "confirm_batch_file", lambda: store.confirm_batch_file(token, step, claimed.digest, ids)
        )

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
        await self._session.learn_policies()
        self._shelf.remember(footer.version_train_steps)
        return ClaimedBatch(batch=batch, digest=footer.payload_sha256, settings=footer.settings, replayed=True)

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
        train_steps, settings = self._shelf.train_steps, step_settings(self._config, train_step)

        def write() -> BatchFooter:
            self._checkpoints.write_batch(batch, cursor, train_steps, settings)
            return self._checkpoints.batch_footer(train_step)

        async def write_unless_superseded() -> BatchFooter:
            # A trainer that was stopped since its claim may wake up behind another one, which has rolled the run back.
            await self._session.check()
            return await asyncio.to_thread(write)

        with tracer().span("write_batch", home):
            footer = await self._patience.with_room("write_batch", write_unless_superseded)
        # The file's own settings: a trainer that was superseded may have written it, with others, in between.
        return ClaimedBatch(batch=batch, digest=footer.payload_sha256, settings=footer.settings, replayed=False)


def step_settings(config: TrainerConfig, train_step: int) -> StepSettings:
    """What the run file says for a train step."""
    algorithm = config.algorithm
    reference = algorithm.kl_reference_version if algorithm.kl_coefficient > 0 else None
    return StepSettings(learning_rate=learning_rate(config, train_step), kl_reference_version=reference)


def _joined(batch: Batch) -> Batch:
    """The batch with one segment for what one policy version wrote in several partial saves."""

    def joined(group: Group) -> Group:
        trajectories = tuple(replace(t, segments=join_segments(t.segments)) for t in group.trajectories)
        return replace(group, trajectories=trajectories)

    return replace(batch, groups=tuple(joined(group) for group in batch.groups))
