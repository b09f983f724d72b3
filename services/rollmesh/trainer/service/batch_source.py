"""Source of the batch of a train step: its batch file if there is one, else the queue; and of its replayed groups."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import chain

from rollmesh.checkpoints.batches import ReplayDraw, StepSettings, StoredBatch, training_batch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config.old_logprob_methods import ReplayConfig, replayed_count
from rollmesh.curriculum.replay import draw_replay, replay_candidates
from rollmesh.errors import CheckpointError, Reason
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.segments import join_group
from rollmesh.trainer.learner.method_binding import differing_settings
from rollmesh.trainer.service.leading_rank import Retry
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.types import Batch

_REWRITABLE = frozenset({Reason.MISSING, Reason.TORN, Reason.TRUNCATED})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedBatch:
    """A batch that was read from its file; the file is on disk and confirmed, so it may be trained on."""

    stored: StoredBatch
    replayed: bool
    """True if the file was written before a restart."""

    training: Batch
    """Groups to train on: those of the file, and the replayed ones."""

    write_seconds: float = 0.0
    """Wall time from the claim to the confirmation of its file; 0 for a file of before."""

    @property
    def batch(self) -> Batch:
        """Fresh groups: those of the cut."""
        return self.stored.batch

    @property
    def replayed_group_ids(self) -> frozenset[str]:
        """Groups of earlier batches."""
        draw = self.stored.footer.replay
        return frozenset() if draw is None else frozenset(group_id for _, group_id in draw.groups)


@dataclass(eq=False)
class BatchSource:
    """Batches in order. A batch is returned only after its file is on disk and Redis has confirmed it."""

    _session: TrainingSession
    _checkpoints: CheckpointStore
    _catalog: PolicyCatalog
    _retry: Retry
    _replay: "ReplaySource"
    _settings: Callable[[int], StepSettings]
    """Function that returns the settings of the run file for a train step."""
    _log: Logger = field(default_factory=lambda: get_logger("batch_source"), init=False)

    async def next(self, train_step: int, timeout: float) -> ClaimedBatch | None:
        """Return the batch of ``train_step``; None after ``timeout`` seconds without a cut, or at shutdown.

        Raises CheckpointError if Redis counts the step as trained but its batch file is missing or damaged, so that the
        step cannot be replayed, or if an earlier batch file that the step draws groups from is.
        """
        claimed = await self._retry.run("read_batch", lambda: self._from_file(train_step))
        if claimed is not None:
            await self._confirm(claimed)
            return claimed
        started_ns, traceparent = time.time_ns(), tracer().train_step(train_step)
        found = await self._session.claim(train_step, timeout)
        if found is None:
            return None
        tracer().span("claim", traceparent, kind="client", start_ns=started_ns, groups=len(found.groups)).end()
        started = time.monotonic()
        claimed = await self._written(found)
        await self._confirm(claimed)
        return replace(claimed, write_seconds=time.monotonic() - started)

    async def _confirm(self, claimed: ClaimedBatch) -> None:
        store, token = self._session.store, self._session.token
        step, ids = claimed.batch.train_step, [g.group_id for g in claimed.batch.groups]
        await self._session.retry(
            "confirm_batch_file",
            lambda: store.training.confirm_batch_file(token, step, claimed.stored.footer.payload_sha256, ids),
        )
        outcomes = claimed.stored.footer.outcomes
        await self._session.retry(
            "save_outcomes", lambda: store.prompt_records.save(token, step, outcomes, self._session.run_id)
        )

    async def _from_file(self, train_step: int) -> ClaimedBatch | None:
        try:
            stored = await asyncio.to_thread(self._checkpoints.stored_batch, train_step)
        except CheckpointError as error:
            if error.outside:
                raise
            if train_step <= self._session.trained_step:
                raise CheckpointError(
                    f"train step {train_step} was trained before but cannot be replayed: {error}",
                    reason=error.reason,
                ) from error
            if error.reason not in _REWRITABLE:
                raise
            if error.reason != Reason.MISSING:
                self._log.warning("batch_file_torn", train_step=train_step, message=str(error))
            return None
        await self._session.learn_policies()
        self._catalog.remember(stored.footer.version_train_steps)
        if differing := differing_settings(stored.footer.settings, self._settings(train_step)):
            self._log.warning("replay_keeps_its_settings", train_step=train_step, differing=differing)
        training = await self._complete(stored)
        return ClaimedBatch(stored=stored, replayed=True, training=training)

    async def _complete(self, stored: StoredBatch) -> Batch:
        return await self._retry.run("read_replayed_groups", lambda: asyncio.to_thread(self._replay.complete, stored))

    async def _written(self, found: Batch) -> ClaimedBatch:
        store, train_step = self._session.store, found.train_step
        joined = await asyncio.to_thread(lambda: tuple(map(join_group, found.groups)))
        batch = replace(found, groups=joined)
        cursor = await self._session.retry("cursor", store.leadership.cursor)
        outcomes = await self._session.retry(
            "unsaved_outcomes", lambda: store.prompt_records.unsaved(self._session.token, train_step)
        )
        await self._session.learn_policies()
        train_steps, settings = self._catalog.train_steps, self._settings(train_step)

        def write() -> StoredBatch:
            # Read the file back: a superseded trainer may have written it in between, with different content.
            self._checkpoints.write_batch(batch, cursor, train_steps, settings, outcomes, self._replay.draw(batch))
            return self._checkpoints.stored_batch(train_step)

        async def write_unless_superseded() -> StoredBatch:
            # If this process was suspended since its claim, a newer trainer may have rolled the run back.
            await self._session.check()
            return await asyncio.to_thread(write)

        with tracer().span("write_batch", tracer().train_step(train_step)):
            stored = await self._retry.run("write_batch", write_unless_superseded)
        self._catalog.remember(stored.footer.version_train_steps)
        training = await self._complete(stored)
        return ClaimedBatch(stored=stored, replayed=False, training=training)


@dataclass(eq=False)
class ReplaySource:
    """Replay of the run file. The last batches stay in memory; after a restart they are read again. Methods block."""

    _config: ReplayConfig | None
    _checkpoints: CheckpointStore
    _catalog: PolicyCatalog
    _progress: Progress
    _seed: int
    _max_staleness: int
    _kept: dict[int, StoredBatch] = field(default_factory=dict, init=False)
    _log: Logger = field(default_factory=lambda: get_logger("replay_source"), init=False)

    def draw(self, fresh: Batch) -> ReplayDraw | None:
        """Draw the replayed groups of a new batch; None without replay.

        Batches from before a rollback are of an abandoned branch and are never drawn from. A batch file that is missing
        or damaged is left out of the draw, with a warning. Raises CheckpointError for one that cannot be read at the
        moment, because the draw must not depend on it.
        """
        if self._config is None:
            return None
        step, config = fresh.train_step, self._config
        window = min(config.batches, self._max_staleness)  # older groups are over the bound
        first = max(step - window, self._progress.rollback_step + 1, 1)
        sources = self._sources(first, step)
        candidates = [replay_candidates(stored.batch, stored.footer.version_train_steps) for stored in sources]
        drawn = draw_replay(
            list(chain.from_iterable(candidates)),
            replayed_count(len(fresh.groups), config.share),
            by=config.by,
            seed=self._seed,
            train_step=step,
            max_staleness=self._max_staleness,
        )
        return ReplayDraw(
            share=config.share,
            by=config.by,
            batches=config.batches,
            seed=self._seed,
            max_staleness=self._max_staleness,
            first=first,
            sources={stored.batch.train_step: stored.footer.payload_sha256 for stored in sources},
            groups=[(candidate.train_step, candidate.group_id) for candidate in drawn],
        )

    def complete(self, stored: StoredBatch) -> Batch:
        """Return the batch of a file with its replayed groups. Raises CheckpointError if the file of one is damaged."""
        train_step, draw = stored.batch.train_step, stored.footer.replay
        batch = training_batch(stored, self._stored)
        for step in {step for step, _ in draw.groups} if draw is not None else ():
            self._catalog.remember(self._stored(step).footer.version_train_steps)
        kept = self._config.batches if self._config is not None else 0
        self._kept[train_step] = stored
        self._kept = {step: file for step, file in self._kept.items() if train_step - kept < step <= train_step}
        return batch

    def _sources(self, first: int, end: int) -> list[StoredBatch]:
        found = []
        for step in range(first, end):
            try:
                found.append(self._stored(step))
            except CheckpointError as error:
                if error.outside:  # a retry draws from it
                    raise
                self._log.warning("replay_without_batch", train_step=end, batch=step, message=str(error))
        return found

    def _stored(self, train_step: int) -> StoredBatch:
        if train_step not in self._kept:
            self._kept[train_step] = self._checkpoints.stored_batch(train_step)
        return self._kept[train_step]
