"""Source of the replayed groups of a train step: a draw among the last batches, or the draw in a batch file."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollmesh.checkpoints.batches import StoredBatch
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.replay_draw import ReplayDraw
from rollmesh.checkpoints.training_batch import training_batch
from rollmesh.config.old_logprob_methods import ReplayConfig, replayed_count
from rollmesh.curriculum.replay import draw_replay, replay_candidates
from rollmesh.errors import CheckpointError
from rollmesh.runtime.logging import Logger, get_logger
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.types import Batch


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
        candidates = [
            candidate
            for stored in sources
            for candidate in replay_candidates(stored.batch, stored.footer.version_train_steps)
        ]
        drawn = draw_replay(
            candidates,
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
        """Return the batch of a file with its replayed groups. Raises CheckpointError if the file of one is not valid.

        The train steps of the policies that wrote the replayed groups are added to the catalog.
        """
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
