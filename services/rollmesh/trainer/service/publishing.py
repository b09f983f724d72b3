"""Publishing of policies: write the folder, announce it, prune. Each train step and version is published once.

The trainer may crash between any two of these steps. A folder without a manifest is not a policy. A complete folder
without an announcement (or whose announcement is missing in a restored Redis) is announced unchanged and not rewritten,
so a version never has two sets of weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Executor
from dataclasses import dataclass, field

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.reasons import TRANSIENT
from rollmesh.config import RunConfig
from rollmesh.errors import CheckpointError, Conflict
from rollmesh.runtime.logging import Logger, get_logger, note_policy_version
from rollmesh.scheduling import Schedule
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.trainer.service.trainer_progress import Progress
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.trainer.service.write_retry import Retry
from rollmesh.types import Int32Array, PolicyRecord

CANARY_SEQUENCES = 8
CANARY_TOKENS = 32
_CANARY_SEED = 20_071_115


def canary_sequences(vocab_size: int) -> list[Int32Array]:
    """Return the canary sequences, which are fixed for a vocabulary size, int32 [tokens] each."""
    noise = np.random.default_rng(_CANARY_SEED)
    return [noise.integers(0, vocab_size, CANARY_TOKENS).astype(np.int32) for _ in range(CANARY_SEQUENCES)]


@dataclass(eq=False)
class Publisher:
    """Publisher of the ranks' weights under the trainer's session."""

    _config: RunConfig
    _ranks: RankCoordinator
    _session: TrainingSession
    _checkpoints: CheckpointStore
    _retry: Retry
    _metrics: TrainerMetrics
    _executor: Executor
    _canary: list[Int32Array]
    _progress: Progress
    _references: Collection[int] = ()
    """KL reference versions, which are never pruned."""
    _log: Logger = field(default_factory=lambda: get_logger("publisher"), init=False)

    async def publish(self, train_step: int) -> PolicyRecord:
        """Publish and announce the weights of ``train_step``, unless that step is published already. Idempotent.

        Every generator rejects a damaged policy. If the newest policy is damaged, the same weights are published as the
        next version.
        """
        newest = await self._session.retry("latest_policy", self._session.store.policies.latest)
        if newest is not None:
            self._ranks.catalog.update([newest])
            self._metrics.policy_version.set(newest.policy_version)
            if newest.train_step > train_step:
                return newest
            published = self._progress.published(newest.path)
            if newest.train_step == train_step and published and not await self._damaged(newest):
                return newest
        version = newest.policy_version + 1 if newest else 0
        record = await self._whole_folder(version, train_step)
        if record is None:
            parent = newest.policy_version if newest else None
            if newest is not None and newest.train_step == train_step and not published:
                parent = self._progress.rolled_back_to
            loop = asyncio.get_running_loop()
            record = await self._retry.run(
                "publish", lambda: loop.run_in_executor(self._executor, self._write, version, train_step, parent)
            )
        await self._announce(record)
        await self._prune()
        return record

    async def _announce(self, record: PolicyRecord) -> None:
        store, token = self._session.store, self._session.token
        try:
            await self._session.retry("announce_policy", lambda: store.policies.announce(token, record))
        except Conflict:
            # A re-assertion after a Redis restart may have announced the policy already.
            if await self._session.retry("policy", lambda: store.policies.get(record.policy_version)) != record:
                raise
        self._ranks.catalog.update([record])
        self._metrics.published.inc()
        note_policy_version(record.policy_version)
        self._metrics.policy_version.set(record.policy_version)
        await self._retry.run("mark_announced", lambda: asyncio.to_thread(self._checkpoints.mark_announced, record))
        self._log.info(
            "policy_announced", policy_version=record.policy_version, train_step=record.train_step, path=record.path
        )

    async def _damaged(self, record: PolicyRecord) -> bool:
        """Tell whether a published folder differs from its announcement; False while the store is unreachable."""
        try:
            await asyncio.to_thread(self._checkpoints.open, record)
        except CheckpointError as error:
            self._log.error(
                "policy_damaged", policy_version=record.policy_version, reason=error.reason, message=str(error)
            )
            return error.reason not in TRANSIENT
        return False

    async def _whole_folder(self, version: int, train_step: int) -> PolicyRecord | None:
        for record in await asyncio.to_thread(self._checkpoints.complete_policies):
            known = (record.policy_version, record.train_step) == (version, train_step)
            if known and self._progress.published(record.path):
                try:
                    await asyncio.to_thread(self._checkpoints.open, record)
                except CheckpointError as error:
                    self._log.warning("unannounced_policy_refused", path=record.path, message=str(error))
                    return None
                return record
        return None

    def _write(self, version: int, train_step: int, parent: int | None) -> PolicyRecord:
        canary = self._ranks.canary(self._canary)
        return self._checkpoints.publish(
            session=self._progress.label(self._session.token),
            policy_version=version,
            train_step=train_step,
            parent=parent,
            write=self._ranks.export,
            canary=canary,
        )

    async def _prune(self) -> None:
        store = self._session.store
        await self._session.learn_policies()
        pinned = await self._session.retry("pinned_policy", store.policies.pinned)
        generators = await self._session.retry("generators", store.generators.live)
        evaluations = await self._session.retry("evaluations", store.evaluations.all)
        kept = {0, *self._references} if pinned is None else {0, *self._references, pinned}
        kept |= {g.policy_version for g in generators}
        kept |= {g.loading_version for g in generators if g.loading_version is not None}
        kept |= {e.request.policy_version for e in evaluations if e.result is None}
        removed = await asyncio.to_thread(
            self._checkpoints.prune,
            self._ranks.catalog.records,
            keep_last=kept_policies(self._config),
            keep_versions=kept,
            session=self._progress.label(self._session.token),
        )
        if removed:
            self._log.info("policies_pruned", paths=removed)


def kept_policies(config: RunConfig) -> int:
    """Return the number of newest policies to keep.

    The old-logprob source ``snapshot`` requires the versions within the staleness bound, plus one for each step that a
    crash replays: a replay that falls back to other logprobs would give other weights than the published ones.
    """
    if config.trainer.algorithm.old_logprobs != "snapshot":
        return config.checkpoints.keep_last
    staleness = Schedule.from_config(config).max_staleness
    return max(config.checkpoints.keep_last, staleness + 1 + config.checkpoints.state_every_steps)
