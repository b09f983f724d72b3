"""The loop that finds the newest policy version, verifies it, loads it, checks the canary and puts it in service.

    consumes     announced policies (store), policy folders (checkpoint store)
    produces     the policy in the engine; the generator's serving state
    waits for    a version that the rules want (scheduling/next_policy.py), or its turn to load it
    unblocked by the trainer's announcement, a pin, the leader's version floor, the end of another generator's load

An adapter is loaded above its base, the policy that the engine starts with, and beside the adapters in use: its canary
is scored while they decode, so nothing pauses and nothing must be restored if it fails. Full weights are scored while
the old ones decode too, if the engine can; else they are swapped in first, and decoding pauses until they pass.

If a policy cannot be served, the old weights keep serving and the reason is logged and counted. If the old weights are
lost too, the generator ends its calls and stays paused and out of rotation until a version passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import Reason
from rollmesh.errors import CheckpointError, DataError, EngineError, StoreUnavailable
from rollmesh.generator.canary import Canary, CanaryFailed, CanaryScores
from rollmesh.generator.engines.engine_protocol import Engine, EngineLost, OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.policy_staging import PolicyStaging, refuse_adapter
from rollmesh.generator.reload_turn import ReloadTurns
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.health import Health
from rollmesh.runtime.logging import get_logger, note_policy_version
from rollmesh.runtime.tasks import BackgroundTasks, Backoff
from rollmesh.runtime.tracing import tracer
from rollmesh.scheduling.next_policy import ReloadRules, next_policy
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.types import PolicyRecord

LOOP_NAME = "policies"
_STALLED_AFTER_SECONDS = 1800.0
_PIN_POLL_SECONDS = 0.5
"""Time between two checks for a pin, which is not announced."""
_BACKOFF = Backoff(first_seconds=1.0, longest_seconds=10.0)
_INTERRUPT_SECONDS = 10.0
_WAIT = "policy"
_RETRIED_REASONS = frozenset(
    {
        Reason.DISK_FULL,
        Reason.UNREACHABLE,
        Reason.REFUSED,
        Reason.MISSING,
        Reason.TORN,
        Reason.TRUNCATED,
        Reason.INVALID,
    }
)
"""Reasons of an outage or of a lagging shared folder; these are retried. Others reject the policy until it changes."""


class PolicyWatcher:
    """Loads the run's effective policy (the pinned one, else the newest) into the engine."""

    def __init__(
        self,
        engine: Engine,
        registry: PolicyRegistry,
        checkpoints: CheckpointStore,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        health: Health,
        *,
        mode: OnNewVersion,
        canary: Canary,
        max_context_tokens: int,
        rules: ReloadRules,
        turns: ReloadTurns,
    ) -> None:
        self._engine = engine
        self._registry = registry
        self._staging = PolicyStaging(engine, checkpoints, metrics)
        self._serving_state = serving_state
        self._metrics = metrics
        self._health = health
        self._mode = mode
        self._canary = canary
        self._max_context_tokens = max_context_tokens
        self._rules = rules
        self._turns = turns
        self._serving: VerifiedPolicy | None = None
        self._served: PolicyRecord | None = None
        """Announcement of ``_serving``."""
        self._base: VerifiedPolicy | None = None
        """Policy that the engine was started with; adapters are applied above it."""
        self._unchecked = False
        """True while the engine holds weights that passed no canary: it stays paused and out of rotation."""
        self._settled: PolicyRecord | None = None
        self._newest_seen = -1
        self._lock = asyncio.Lock()
        self._requested = BackgroundTasks()
        """Loads requested through ``load_version``."""
        self._log = get_logger("policies")

    async def run(self) -> None:
        """Follow the effective policy until cancelled."""
        self._health.watch(LOOP_NAME, _STALLED_AFTER_SECONDS)
        failure_count = 0
        try:
            while True:
                self._health.beat(LOOP_NAME)
                retry_seconds = _BACKOFF.seconds(failure_count + 1)
                try:
                    settled = await self._load_if_changed()
                except StoreUnavailable as error:
                    self._metrics.reload_failed("store")
                    self._log.warning("policy_unknown", message=str(error), retry_seconds=retry_seconds)
                    settled = False
                failure_count = 0 if settled else failure_count + 1
                if not settled:
                    await asyncio.sleep(retry_seconds)
        finally:
            for load in self._requested:
                load.cancel()

    async def load_version(self, version: int) -> int:
        """Load one version immediately, regardless of the effective policy; returns the version in service.

        Raises DataError for an unknown version, CheckpointError or EngineError if it cannot be served.
        """
        record = await self._registry.get(version)
        if record is None:
            raise DataError(f"policy_version={version}: this policy version has not been announced")
        # A separate task: a caller that disconnects must not leave the engine half-way between two policies.
        load = self._requested.start(self._load(record), "load-policy")
        load.add_done_callback(lambda ended: self._ended(record, ended))
        await asyncio.shield(load)
        return record.policy_version

    def _ended(self, record: PolicyRecord, load: asyncio.Task[None]) -> None:
        if not load.cancelled() and isinstance(error := load.exception(), Exception):
            self._refused(record, error)

    async def _load_if_changed(self) -> bool:
        """Load the policy that the rules want; return False if the load must be retried soon."""
        outlook = await self._registry.outlook(self._serving_state.instance_id)
        choice = next_policy(
            self._served,
            outlook.newest,
            outlook.pinned,
            self._rules,
            required_version=outlook.required_version,
            in_rotation=not (self._unchecked or self._serving_state.out_of_rotation),
        )
        if choice is None or choice.record == self._settled:
            self._turns.clear()
            return await self._wait()
        async with self._turns.turn(choice.record.policy_version, urgent=choice.urgent) as granted:
            return await self._load_or_refuse(choice.record) if granted else await self._wait()

    async def _wait(self) -> bool:
        """Wait until a version is announced or it is time to look for a pin; returns True: nothing failed."""
        newest = await self._registry.wait(self._newest_seen, _PIN_POLL_SECONDS)
        self._newest_seen = max(self._newest_seen, newest.policy_version if newest else -1)
        return True

    async def _load_or_refuse(self, record: PolicyRecord) -> bool:
        """Load a policy; returns False if the load must be retried soon."""
        try:
            await self._load(record)
        except CheckpointError as error:
            self._refused(record, error)
            if error.reason == Reason.REFUSED and not self._serving_state.started:
                raise  # without an older policy to serve, the process ends, and with it the run
            if error.reason in _RETRIED_REASONS:
                return False
        except EngineLost as error:
            # The engine cannot recover: the process exits and its supervisor starts a new one.
            self._serving_state.take_out_of_service(str(error))
            self._refused(record, error)
            raise
        except EngineError as error:
            self._refused(record, error)
            if not self._serving_state.started:
                # The first load: no older policy serves, so the process exits. A final error also ends the run.
                raise
        self._settled = record
        return True

    def _refused(self, record: PolicyRecord, error: Exception) -> None:
        reason = "canary" if isinstance(error, CanaryFailed) else "engine"
        if isinstance(error, CheckpointError):
            reason = error.reason
        self._metrics.reload_failed(reason)
        self._health.waits.begin(_WAIT, f"policy version {record.policy_version}: {error}")
        if not (isinstance(error, CheckpointError) and error.outside):
            self._serving_state.refuse(record.policy_version, f"{reason}: {error}", retried=reason in _RETRIED_REASONS)
        old = self._serving.manifest.policy_version if self._serving is not None else None
        self._log.error(
            "policy_refused",
            policy_version=record.policy_version,
            reason=reason,
            message=str(error),
            still_serving=old,
            out_of_rotation=self._serving_state.reason,
        )

    async def _load(self, record: PolicyRecord) -> None:
        """Verify, load and check a policy; if a step fails, raise and leave the old policy in the engine."""
        async with self._lock:
            if self._serves(record):
                self._serving_state.put_in_service()
                return
            step = tracer().train_step(record.train_step)
            with (
                tracer().span("policy_load", step, kind="consumer", policy_version=record.policy_version),
                # The checkpoint that is being loaded is not pruned, even if newer versions follow.
                self._serving_state.loading(record.policy_version),
            ):
                await self._load_now(record)
        self._health.waits.end(_WAIT)
        self._serving_state.accept(record.policy_version)
        note_policy_version(record.policy_version)

    async def _load_now(self, record: PolicyRecord) -> None:
        self._metrics.reloads.inc()
        started = time.monotonic()
        known = self._serving.manifest if self._serving is not None else None
        pause_seconds = 0.0
        at_start = not self._serving_state.started
        if at_start:
            policy = await self._staging.verified(record)
            if self._mode is not OnNewVersion.NEXT_SLICE:
                refuse_adapter(policy.manifest)
            await self._start(policy)
        elif self._mode is OnNewVersion.NEXT_SLICE:
            # An adapter is small, and a server that stages it keeps it: its bytes are verified first.
            policy = await self._staging.verified(record, known)
            await self._load_beside(policy)
        else:
            policy, scorable = await self._staging.staged(record, known)
            if scorable:
                await self._check_or_leave(policy, record.policy_version)
            pause_seconds = await self._replace(policy, checked=scorable)
        self._serving, self._served = policy, record
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

    def _serves(self, record: PolicyRecord) -> bool:
        serving = self._serving
        same = serving is not None and serving.manifest.policy_version == record.policy_version
        return same and not self._unchecked

    async def _start(self, policy: VerifiedPolicy) -> None:
        first = policy.base or policy
        await self._engine.start(first.folder, first.manifest.policy_version)
        self._base = first
        # There is no older policy to restore: the engine keeps these weights until a version passes.
        await self._check_or_leave(first)
        self._serving = first
        if policy is first:
            self._serving_state.put_in_service()
        else:
            self._serving_state.take_out_of_service("the newest adapter has not been loaded yet")
            await self._load_beside(policy)

    async def _load_beside(self, policy: VerifiedPolicy) -> None:
        """Load an adapter, or return to the base, while calls run; it goes into service once its canary has passed."""
        self._check_base(policy)
        version = policy.manifest.policy_version
        await self._staging.timed("stage", self._engine.stage(policy.folder, version))
        await self._check_or_leave(policy, version)
        await self._engine.load(policy.folder, version, self._mode)
        self._serving_state.put_in_service()

    def _check_base(self, policy: VerifiedPolicy) -> None:
        """Raise CheckpointError unless the policy is the base in the engine, or an adapter above it."""
        assert self._base is not None
        wanted, found = self._base.manifest, (policy.base or policy).manifest
        if (found.policy_version, found.files) != (wanted.policy_version, wanted.files):
            raise CheckpointError(
                f"policy_version {policy.manifest.policy_version}: its base is policy version {found.policy_version}, "
                f"but the engine was started with policy version {wanted.policy_version} of other files; restart the "
                "generator, and train the adapter above the initial policy of its run",
                reason=Reason.FOREIGN_ARCHITECTURE,
            )

    async def _replace(self, policy: VerifiedPolicy, *, checked: bool) -> float:
        """Swap policies under ``generator.on_new_version``; returns the seconds during which decoding was held."""
        if self._mode is OnNewVersion.DRAIN:
            self._serving_state.set_reloading(True)
        try:
            if self._mode is OnNewVersion.DRAIN:
                await self._serving_state.until_idle()
            return await (self._swap(policy) if checked else self._swap_and_check(policy))
        finally:
            self._serving_state.set_reloading(False)

    async def _swap(self, policy: VerifiedPolicy) -> float:
        """Put a policy in service that has passed its canary."""
        load = self._engine.load(policy.folder, policy.manifest.policy_version, self._mode)
        held_seconds = await self._staging.timed("swap", load)
        self._serving_state.put_in_service()
        if self._unchecked:
            self._unchecked = False
            await self._engine.resume()
        return held_seconds

    async def _swap_and_check(self, policy: VerifiedPolicy) -> float:
        """Put a policy in service, holding decoding until its canary has passed: unchecked weights sample no token."""
        engine, version = self._engine, policy.manifest.policy_version
        was_paused = engine.status().paused and not self._unchecked
        started = time.monotonic()
        await engine.pause()
        try:
            await self._staging.timed("swap", engine.load(policy.folder, version, self._mode))
            await self._check_or_restore(policy)
            self._serving_state.put_in_service()
        finally:
            if not (was_paused or self._unchecked):
                await engine.resume()
        return time.monotonic() - started

    async def _check_or_restore(self, policy: VerifiedPolicy) -> None:
        """Check the policy that was just loaded; restore the last good one if the check fails.

        After a restore the running calls continue and new calls are rejected. If the restore fails too, the running
        calls end as interrupted.
        """
        self._unchecked = True
        try:
            await self._check_canary(policy)
        except EngineLost:
            raise
        except EngineError as error:
            self._serving_state.take_out_of_service(str(error))
            self._unchecked = not await self._restore_old_policy()
            raise
        self._unchecked = False

    async def _check_or_leave(self, policy: VerifiedPolicy, staged_version: int | None = None) -> None:
        """Check the policy in the engine, or a staged one; leave the rotation if the check fails, and raise."""
        try:
            await self._check_canary(policy, staged_version)
        except EngineLost:
            raise
        except EngineError as error:
            self._serving_state.take_out_of_service(str(error))
            raise

    async def _restore_old_policy(self) -> bool:
        """Load the last good policy again; return True if it is in the engine."""
        if self._serving is None:
            return False
        version = self._serving.manifest.policy_version
        try:
            await self._engine.load(self._serving.folder, version, self._mode)
        except EngineLost:
            raise
        except EngineError as error:
            self._log.error("old_policy_not_loaded", policy_version=version, message=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_INTERRUPT_SECONDS):
                    await self._serving_state.interrupt_all(self._engine)
            return False
        return True

    async def _check_canary(self, policy: VerifiedPolicy, staged_version: int | None = None) -> None:
        manifest = policy.manifest
        sequences = [np.array(c.token_ids[: self._max_context_tokens], np.int32) for c in manifest.canary]
        engine = await self._staging.timed("canary", self._engine.score(sequences, staged_version))
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
