"""Verification of a policy while the engine reads it, and the times of a load's phases.

    fetch     the folder is brought to this node (object stores only) and its manifest is verified
    verify    every file is compared with its digest
    stage     the engine reads the weights, at the same time: the kernel reads the disk once for both

The engine may stage weights that are then rejected: they are never swapped in, and the next stage replaces them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable
from typing import TypeVar

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError
from rollmesh.generator.engines.engine_protocol import Engine
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.types import PolicyRecord

T = TypeVar("T")


class PolicyStaging:
    """Staging of verified policies in one engine."""

    def __init__(self, engine: Engine, checkpoints: CheckpointStore, metrics: GeneratorMetrics) -> None:
        self._engine = engine
        self._checkpoints = checkpoints
        self._metrics = metrics

    async def verified(self, record: PolicyRecord, like: Manifest | None = None) -> VerifiedPolicy:
        """Verify a policy before the engine reads it. Raises CheckpointError."""
        return await self.timed("verify", asyncio.to_thread(self._checkpoints.open, record, like=like))

    async def staged(self, record: PolicyRecord, like: Manifest | None) -> tuple[VerifiedPolicy, bool]:
        """Verify full weights while the engine stages them; the engine serves the old ones.

        Returns the policy, and True if the engine can score it before it is swapped in.
        Raises CheckpointError if the policy cannot be verified, EngineError if the engine cannot serve it.
        """
        fetched = await self.timed("fetch", asyncio.to_thread(self._checkpoints.fetch, record, like=like))
        refuse_adapter(fetched.manifest)
        verified, scorable = await asyncio.gather(
            self.timed("verify", asyncio.to_thread(self._checkpoints.verify, fetched)),
            self.timed("stage", self._engine.stage(fetched.folder, record.policy_version)),
            return_exceptions=True,
        )
        if isinstance(verified, CheckpointError):
            # A damaged copy of an object store's policy is pulled again; in a shared folder this raises the error.
            policy = await self.timed("verify", asyncio.to_thread(self._checkpoints.open, record, like=like))
            return policy, await self.timed("stage", self._engine.stage(policy.folder, record.policy_version))
        if isinstance(verified, BaseException):
            raise verified
        if isinstance(scorable, BaseException):
            raise scorable
        return verified, scorable

    async def timed(self, phase: str, work: Awaitable[T]) -> T:
        """Await ``work`` and record its seconds, unless it fails."""
        started = time.monotonic()
        result = await work
        self._metrics.phase_seconds.labels(phase=phase).observe(time.monotonic() - started)
        return result


def refuse_adapter(manifest: Manifest) -> None:
    """Raise CheckpointError for an adapter, for an engine that was started for full weights."""
    if manifest.base is not None:
        raise CheckpointError(
            f"policy_version {manifest.policy_version}: is an adapter, but the run file has no model.adapter; start "
            "the generator with the run file of the run that trained it",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )
