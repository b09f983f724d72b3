"""Loading of one policy version: verification, staging, the canary and the swap, with the old policy to fall back to.

    fetch     the folder is brought to this node (object stores only) and its manifest is verified
    verify    every file is compared with its digest
    stage     the engine reads the weights, at the same time: the kernel reads the disk once for both
    canary    the engine's log-probabilities are compared with the trainer's
    swap      the weights are put in use

An adapter is loaded above its base, the policy that the engine starts with, and beside the adapters in use: its canary
is scored while they decode, so nothing pauses and nothing must be restored if it fails. Full weights are scored while
the old ones decode too, if the engine can; else they are swapped in first, and decoding pauses until they pass.

If a policy cannot be served, the old weights keep serving. If they are lost too, the generator ends its calls and stays
paused and out of rotation until a version passes.
"""

import asyncio
import contextlib
import time
from collections.abc import Awaitable
from typing import TypeVar

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.errors import CheckpointError, EngineError, Reason
from rollmesh.generator.canary import Canary, CanaryScores
from rollmesh.generator.engines.engine_protocol import Engine, EngineLost, OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.logging import get_logger
from rollmesh.types import PolicyRecord

T = TypeVar("T")

_INTERRUPT_SECONDS = 10.0


class PolicyLoader:
    """Loader of policies into one engine; one load at a time."""

    def __init__(
        self,
        engine: Engine,
        checkpoints: CheckpointStore,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        *,
        mode: OnNewVersion,
        canary: Canary,
        max_context_tokens: int,
    ) -> None:
        self._engine = engine
        self._checkpoints = checkpoints
        self._serving_state = serving_state
        self._metrics = metrics
        self._mode = mode
        self._canary = canary
        self._max_context_tokens = max_context_tokens
        self.serving: VerifiedPolicy | None = None
        """Last policy that passed its canary."""
        self._base: VerifiedPolicy | None = None
        """Policy that the engine was started with; adapters are applied above it."""
        self.unchecked = False
        """True while the engine holds weights that passed no canary: it stays paused and out of rotation."""
        self._log = get_logger("policies")

    async def load(self, record: PolicyRecord) -> None:
        """Verify, load and check a policy; if a step fails, raise and leave the old policy in the engine."""
        self._metrics.reloads.inc()
        started = time.monotonic()
        known = self.serving.manifest if self.serving is not None else None
        pause_seconds = 0.0
        at_start = not self._serving_state.started
        if at_start:
            policy = await self._verified(record)
            if self._mode is not OnNewVersion.NEXT_SLICE:
                _refuse_adapter(policy.manifest)
            await self._start(policy)
        elif self._mode is OnNewVersion.NEXT_SLICE:
            # An adapter is small, and a server that stages it keeps it: its bytes are verified first.
            policy = await self._verified(record, known)
            await self._load_beside(policy)
        else:
            policy, scorable = await self.staged(record, known)
            if scorable:
                await self._check(policy, record.policy_version)
            pause_seconds = await self._replace(policy, checked=scorable)
        self.serving = policy
        seconds = time.monotonic() - started
        self._metrics.reload_seconds.observe(seconds)
        self._metrics.pause_seconds.observe(pause_seconds)
        self._metrics.reload_bytes.inc(sum(f.size_bytes for f in policy.manifest.files))
        self._metrics.last_reload.set_to_current_time()
        self._log.info(
            "policy_in_service",
            policy_version=record.policy_version,
            train_step=record.train_step,
            seconds=round(seconds, 4),
            pause_seconds=round(pause_seconds, 4),
            at_start=at_start,
        )

    async def _start(self, policy: VerifiedPolicy) -> None:
        first = policy.base or policy
        await self._engine.start(first.folder, first.manifest.policy_version)
        self._base = first
        # There is no older policy to restore: the engine keeps these weights until a version passes.
        await self._check(first)
        self.serving = first
        if policy is first:
            self._serving_state.put_in_service()
        else:
            self._serving_state.take_out_of_service("the newest adapter has not been loaded yet")
            await self._load_beside(policy)

    async def _load_beside(self, policy: VerifiedPolicy) -> None:
        """Load an adapter, or return to the base, while calls run; it goes into service once its canary has passed."""
        assert self._base is not None
        version = policy.manifest.policy_version
        wanted, found = self._base.manifest, (policy.base or policy).manifest
        if (found.policy_version, found.files) != (wanted.policy_version, wanted.files):
            raise CheckpointError(
                f"policy_version {version}: its base is policy version {found.policy_version}, but the engine was "
                f"started with policy version {wanted.policy_version} of other files; restart the generator, and train "
                "the adapter above the initial policy of its run",
                reason=Reason.FOREIGN_ARCHITECTURE,
            )
        await self._timed("stage", self._engine.stage(policy.folder, version))
        await self._check(policy, version)
        await self._engine.load(policy.folder, version, self._mode)
        self._serving_state.put_in_service()

    async def _replace(self, policy: VerifiedPolicy, *, checked: bool) -> float:
        """Swap policies under ``generator.on_new_version``; returns the seconds during which decoding was held."""
        try:
            if self._mode is OnNewVersion.DRAIN:
                self._serving_state.set_reloading(True)
                await self._serving_state.until_idle()
            return await (self._swap(policy) if checked else self._swap_and_check(policy))
        finally:
            self._serving_state.set_reloading(False)

    async def _swap(self, policy: VerifiedPolicy) -> float:
        """Put a policy in service that has passed its canary."""
        load = self._engine.load(policy.folder, policy.manifest.policy_version, self._mode)
        held_seconds = await self._timed("swap", load)
        self._serving_state.put_in_service()
        if self.unchecked:
            self.unchecked = False
            await self._engine.resume()
        return held_seconds

    async def _swap_and_check(self, policy: VerifiedPolicy) -> float:
        """Put a policy in service, holding decoding until its canary has passed: unchecked weights sample no token."""
        engine, version = self._engine, policy.manifest.policy_version
        was_paused = engine.status().paused and not self.unchecked
        started = time.monotonic()
        await engine.pause()
        try:
            await self._timed("swap", engine.load(policy.folder, version, self._mode))
            self.unchecked = True
            try:
                await self._check(policy)
            except EngineLost:
                raise
            except EngineError:
                # Running calls continue on the old policy, new calls are rejected. Without it, the running calls end.
                self.unchecked = not await self._restore_old_policy()
                raise
            self.unchecked = False
            self._serving_state.put_in_service()
        finally:
            if not (was_paused or self.unchecked):
                await engine.resume()
        return time.monotonic() - started

    async def _restore_old_policy(self) -> bool:
        if self.serving is None:
            return False
        version = self.serving.manifest.policy_version
        try:
            await self._engine.load(self.serving.folder, version, self._mode)
        except EngineLost:
            raise
        except EngineError as error:
            self._log.error("old_policy_not_loaded", policy_version=version, message=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERRUPT_SECONDS):
                    await self._serving_state.interrupt_all(self._engine)
            return False
        return True

    async def _check(self, policy: VerifiedPolicy, staged_version: int | None = None) -> None:
        """Score the canary on the policy in the engine or a staged one; if it fails, leave the rotation and raise."""
        manifest = policy.manifest
        sequences = [np.array(c.token_ids[: self._max_context_tokens], np.int32) for c in manifest.canary]
        try:
            engine = await self._timed("canary", self._engine.score(sequences, staged_version))
            trainer = [np.array(c.logprobs[: len(found)]) for found, c in zip(engine, manifest.canary, strict=True)]
            scores = CanaryScores(
                policy_version=manifest.policy_version,
                engine_logprobs=np.concatenate(engine).astype(np.float64),
                trainer_logprobs=np.concatenate(trainer).astype(np.float64),
                weights=frozenset(file.sha256 for file in manifest.files if file.path.endswith(".safetensors")),
                is_adapter=policy.base is not None,
            )
            self._metrics.canary_gap.set(scores.gap)
            self._canary.check(scores)
        except EngineLost:
            raise
        except EngineError as error:
            self._serving_state.take_out_of_service(str(error))
            raise

    async def _verified(self, record: PolicyRecord, like: Manifest | None = None) -> VerifiedPolicy:
        return await self._timed("verify", asyncio.to_thread(self._checkpoints.open, record, like=like))

    async def staged(self, record: PolicyRecord, like: Manifest | None) -> tuple[VerifiedPolicy, bool]:
        """Verify full weights while the engine stages them; the engine serves the old ones.

        Returns the policy, and True if the engine can score it before it is swapped in.
        Raises CheckpointError if the policy cannot be verified, EngineError if the engine cannot serve it.
        """
        fetched = await self._timed("fetch", asyncio.to_thread(self._checkpoints.fetch, record, like=like))
        _refuse_adapter(fetched.manifest)
        verified, scorable = await asyncio.gather(
            self._timed("verify", asyncio.to_thread(self._checkpoints.verify, fetched)),
            self._timed("stage", self._engine.stage(fetched.folder, record.policy_version)),
            return_exceptions=True,
        )
        if isinstance(verified, CheckpointError):
            # A damaged copy of an object store's policy is pulled again; in a shared folder this raises the error.
            policy = await self._verified(record, like)
            return policy, await self._timed("stage", self._engine.stage(policy.folder, record.policy_version))
        if isinstance(verified, BaseException):
            raise verified
        if isinstance(scorable, BaseException):
            raise scorable
        return verified, scorable

    async def _timed(self, phase: str, work: Awaitable[T]) -> T:
        started = time.monotonic()
        result = await work
        self._metrics.phase_seconds.labels(phase=phase).observe(time.monotonic() - started)
        return result


def _refuse_adapter(manifest: Manifest) -> None:
    """Raise CheckpointError for an adapter, for an engine that was started for full weights."""
    if manifest.base is not None:
        raise CheckpointError(
            f"policy_version {manifest.policy_version}: is an adapter, but the run file has no model.adapter; start "
            "the generator with the run file of the run that trained it",
            reason=Reason.FOREIGN_ARCHITECTURE,
        )
