"""Announcement of written policies, and pruning of the old ones."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.config import RunConfig
from rollmesh.errors import Conflict
from rollmesh.runtime.logging import Logger, get_logger, note_policy_version
from rollmesh.scheduling import Schedule
from rollmesh.trainer.records.trainer_metrics import TrainerMetrics
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.training_session import TrainingSession
from rollmesh.trainer.service.write_retry import Retry
from rollmesh.types import PolicyRecord


@dataclass(eq=False)
class Announcer:
    """Announcer of policies under the trainer's session."""

    _config: RunConfig
    _catalog: PolicyCatalog
    _session: TrainingSession
    _checkpoints: CheckpointStore
    _retry: Retry
    _metrics: TrainerMetrics
    _references: Collection[int] = ()
    """KL reference versions, which are never pruned."""
    _log: Logger = field(default_factory=lambda: get_logger("publisher"), init=False)

    async def announce(self, record: PolicyRecord) -> None:
        """Announce a policy, then mark its folder. Idempotent."""
        store, token = self._session.store, self._session.token
        try:
            await self._session.retry("announce_policy", lambda: store.policies.announce(token, record))
        except Conflict:
            # A re-assertion after a Redis restart may have announced the policy already.
            if await self._session.retry("policy", lambda: store.policies.get(record.policy_version)) != record:
                raise
        self._catalog.update([record])
        self._metrics.published.inc()
        note_policy_version(record.policy_version)
        self._metrics.policy_version.set(record.policy_version)
        await self._retry.run("mark_announced", lambda: asyncio.to_thread(self._checkpoints.mark_announced, record))
        self._log.info(
            "policy_announced", policy_version=record.policy_version, train_step=record.train_step, path=record.path
        )

    async def prune(self, session: str) -> None:
        """Delete old policies; ``session`` is the label of the folders of this trainer."""
        await self._session.learn_policies()
        removed = await self._retry.run("prune_policies", lambda: self._prune(session))
        if removed:
            self._log.info("policies_pruned", paths=removed)

    async def _prune(self, session: str) -> list[str]:
        store = self._session.store
        pinned = await self._session.retry("pinned_policy", store.policies.pinned)
        generators = await self._session.retry("generators", store.generators.live)
        evaluations = await self._session.retry("evaluations", store.evaluations.all)
        rollback = await self._session.retry("rollback_request", store.rollbacks.pending)
        kept = {0, *self._references} if pinned is None else {0, *self._references, pinned}
        kept |= {g.policy_version for g in generators}
        kept |= {g.loading_version for g in generators if g.loading_version is not None}
        kept |= {e.request.policy_version for e in evaluations if e.result is None}
        if rollback is not None:  # it is carried out only after the publication in flight, which prunes
            kept.add(rollback.policy_version)
        prune = partial(
            self._checkpoints.prune,
            self._catalog.records,
            keep_last=kept_policies(self._config),
            keep_versions=kept,
            session=session,
        )
        return await asyncio.to_thread(prune)


def kept_policies(config: RunConfig) -> int:
    """Return the number of newest policies to keep.

    The old-logprob source ``snapshot`` requires the versions within the staleness bound, plus one for each step that a
    crash replays: a replay that falls back to other logprobs would give other weights than the published ones.
    """
    if config.trainer.algorithm.old_logprobs != "snapshot":
        return config.checkpoints.keep_last
    staleness = Schedule.from_config(config).max_staleness
    return max(config.checkpoints.keep_last, staleness + 1 + config.checkpoints.state_every_steps)
