"""Following the policy: find the newest version, verify it, load it, check it on the canary, put it in service.

    consumes     announced policies (store), policy folders (checkpoint store)
    produces     the policy in the engine; whether the generator is in rotation
    waits for    a version above the newest seen, or a pin
    unblocked by the trainer's announcement

Whatever is wrong with a policy, the old weights keep serving and the reason is logged and counted. Should they be lost
too, the generator ends its calls and stays out of rotation, paused, until a version passes.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import Manifest
from rollmesh.checkpoints.policies import VerifiedPolicy
from rollmesh.checkpoints.reasons import PASSING, Reason
from rollmesh.errors import CheckpointError, DataError, EngineError, StoreUnavailable
from rollmesh.generator.canary import Canary, CanaryFailed, CanaryScores
from rollmesh.generator.engines.engine_protocol import Engine, EngineLost, OnNewVersion
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.interrupt_all import interrupt_all
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.health import Health
from rollmesh.runtime.logging import get_logger, note_policy_version
from rollmesh.runtime.tracing import tracer
from rollmesh.store import TrajectoryStore
from rollmesh.types import PolicyRecord

LOOP_NAME = "policies"
_STALLED_AFTER_SECONDS = 1800.0
_LOOK_SECONDS = 0.5
"""A pin is no announcement: it is looked for this often."""
_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 10.0
_INTERRUPT_SECONDS = 10.0
_PASSING = frozenset({Reason.MISSING, Reason.TORN, Reason.TRUNCATED, Reason.DISK_FULL, Reason.INVALID})
"""What a shared folder that lags behind can look like: tried again. The rest is refused until the policy changes."""


class PolicyWatcher:
    """Keeps the engine on the run's effective policy (the pinned one, else the newest)."""

    def __init__(
        self,
        engine: Engine,
        store: TrajectoryStore,
        checkpoints: CheckpointStore,
        rotation: ServingState,
        metrics: GeneratorMetrics,
        health: Health,
        *,
        mode: OnNewVersion,
        canary: Canary,
        max_context_tokens: int,
    ) -> None:
        self._engine = engine
        self._store = store
        self._checkpoints = checkpoints
        self._rotation = rotation
        self._metrics = metrics
        self._health = health
        self._mode = mode
        self._canary = canary
        self._max_context_tokens = max_context_tokens
        self._serving: VerifiedPolicy | None = None
        self._unchecked = False
        """Whether the engine holds weights that passed no canary: then it stays paused and out of rotation."""
        self._settled: PolicyRecord | None = None
        self._newest_seen = -1
        self._lock = asyncio.Lock()
        self._requested: set[asyncio.Task[None]] = set()
        """Loads that somebody asked for by version."""
        self._log = get_logger("policies")

    async def run(self) -> None:
        """Follow the effective policy until cancelled."""
        self._health.watch(LOOP_NAME, _STALLED_AFTER_SECONDS)
        retry_seconds = _FIRST_RETRY_SECONDS
        try:
            while True:
                self._health.beat(LOOP_NAME)
                try:
                    settled = await self._look()
                except StoreUnavailable as error:
                    self._metrics.reload_failed("store")
                    self._log.warning("policy_unknown", message=str(error), retry_seconds=retry_seconds)
                    settled = False
                retry_seconds = _FIRST_RETRY_SECONDS if settled else min(2 * retry_seconds, _LONGEST_RETRY_SECONDS)
                if not settled:
                    await asyncio.sleep(retry_seconds)
        finally:
            for load in self._requested:
                load.cancel()

    async def load_version(self, version: int) -> int:
        """Load one version now, whatever is effective; returns the version in service.

        DataError when there is no such version; CheckpointError or EngineError when it cannot be served.
        """
        record = await self._store.policy(version)
        if record is None:
            raise DataError(f"policy_version={version}: no such policy has been announced")
        # On its own: a caller that hangs up must not leave an engine half-way between two policies.
        load = asyncio.create_task(self._load(record), name="load-policy")
        self._requested.add(load)
        load.add_done_callback(lambda ended: self._ended(record, ended))
        await asyncio.shield(load)
        return record.policy_version

    def _ended(self, record: PolicyRecord, load: asyncio.Task[None]) -> None:
        self._requested.discard(load)
        if not load.cancelled() and isinstance(error := load.exception(), Exception):
            self._refused(record, error.reason if isinstance(error, CheckpointError) else "engine", error)

    async def _look(self) -> bool:
        """Load the effective policy if it has changed; False when that should be tried again soon."""
        record = await self._store.effective_policy(self._rotation.instance_id)
        if record is None or record == self._settled or await self._forgotten(record):
            newest = await self._store.wait_policy(self._newest_seen, _LOOK_SECONDS)
            self._newest_seen = max(self._newest_seen, newest.policy_version if newest else -1)
            return True
        try:
            await self._load(record)
        except CheckpointError as error:
            reason = Reason(error.reason)
            self._refused(record, reason.value, error)
            if reason in _PASSING:
                return False
        except CanaryFailed as error:
            self._refused(record, "canary", error)
        except EngineLost as error:
            # Nothing serves any more, so nothing is left to wait for: the process ends and starts anew.
            self._rotation.take_out(str(error))
            self._refused(record, "engine", error)
            raise
        except EngineError as error:
            self._refused(record, "engine", error)
            if not self._rotation.started:
                # The first load: nothing older serves, so the process ends. A final error ends the run with it.
                raise
        self._settled = record
        return True

    async def _forgotten(self, record: PolicyRecord) -> bool:
        """Whether Redis came back as an earlier state: versions only rise, unless an older one is pinned."""
        serving = self._serving
        if serving is None or record.policy_version >= serving.manifest.policy_version:
            return False
        return await self._store.pinned_policy(self._rotation.instance_id) is None

    def _refused(self, record: PolicyRecord, reason: str, error: Exception) -> None:
        self._metrics.reload_failed(reason)
        if reason not in PASSING:
            self._rotation.refuse(record.policy_version, f"{reason}: {error}", retried=reason in _PASSING)
        old = self._serving.manifest.policy_version if self._serving is not None else None
        self._log.error(
            "policy_refused",
            policy_version=record.policy_version,
            reason=reason,
            message=str(error),
            still_serving=old,
            out_of_rotation=self._rotation.reason,
        )

    async def _load(self, record: PolicyRecord) -> None:
        """Verify, load, check; raises and leaves the old policy in the engine when any of it fails."""
        async with self._lock:
            if self._serves(record):
                self._rotation.put_in()
                return
            step = tracer().train_step(record.train_step)
            with (
                tracer().span("policy_load", step, kind="consumer", policy_version=record.policy_version),
                # However long it takes and however many versions follow: what is being loaded is not pruned.
                self._rotation.loading(record.policy_version),
            ):
                await self._load_now(record)
        self._rotation.accept(record.policy_version)
        note_policy_version(record.policy_version)

    async def _load_now(self, record: PolicyRecord) -> None:
        self._metrics.reloads.inc()
        started = time.monotonic()
        known: Manifest | None = self._serving.manifest if self._serving is not None else None
        policy = await asyncio.to_thread(lambda: self._checkpoints.open(record, like=known))
        if self._rotation.started:
            pause_seconds = await self._replace(policy)
        else:
            await self._start(policy)
            pause_seconds = 0.0
        self._serving = policy
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
        )

    def _serves(self, record: PolicyRecord) -> bool:
        serving = self._serving
        same = serving is not None and serving.manifest.policy_version == record.policy_version
        return same and not self._unchecked

    async def _start(self, policy: VerifiedPolicy) -> None:
        await self._engine.start(policy.folder, policy.manifest.policy_version)
        try:
            await self._check_canary(policy)
        except EngineLost:
            raise
        except EngineError as error:
            # Nothing older to go back to. The engine stays on these weights until a version passes.
            self._rotation.take_out(str(error))
            raise
        self._rotation.put_in()

    async def _replace(self, policy: VerifiedPolicy) -> float:
        """Swap under the run's rule; returns the seconds during which decoding was held."""
        engine, version = self._engine, policy.manifest.policy_version
        await engine.stage(policy.folder)
        if self._mode is OnNewVersion.DRAIN:
            self._rotation.set_reloading(True)
        try:
            if self._mode is OnNewVersion.DRAIN:
                await self._rotation.until_idle()
            held_by_others = engine.status().paused and not self._unchecked
            started = time.monotonic()
            # Held until the canary has passed: no token is ever sampled from unchecked weights.
            await engine.pause()
            try:
                await engine.load(policy.folder, version, self._mode)
                await self._check_or_go_back(policy)
                self._rotation.put_in()
            finally:
                if not (held_by_others or self._unchecked):
                    await engine.resume()
            return time.monotonic() - started
        finally:
            self._rotation.set_reloading(False)

    async def _check_or_go_back(self, policy: VerifiedPolicy) -> None:
        """Check what was just loaded. When it fails, the last good policy goes back into the engine and its calls go
        on, while new ones are refused; if it cannot go back either, the calls are ended too."""
        self._unchecked = True
        try:
            await self._check_canary(policy)
        except EngineLost:
            raise
        except EngineError as error:
            self._rotation.take_out(str(error))
            self._unchecked = not await self._went_back()
            raise
        self._unchecked = False

    async def _went_back(self) -> bool:
        """Whether the last good policy is in the engine again."""
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
                    await interrupt_all(self._engine, self._rotation)
            return False
        return True

    async def _check_canary(self, policy: VerifiedPolicy) -> None:
        scores = await self._canary_scores(policy.manifest)
        self._metrics.canary_gap.set(scores.gap)
        self._canary.check(scores)

    async def _canary_scores(self, manifest: Manifest) -> CanaryScores:
        sequences = [np.array(c.token_ids[: self._max_context_tokens], np.int32) for c in manifest.canary]
        own = await self._engine.score(sequences)
        theirs = [np.array(c.logprobs[: len(mine)]) for mine, c in zip(own, manifest.canary, strict=True)]
        return CanaryScores(
            policy_version=manifest.policy_version,
            own=np.concatenate(own).astype(np.float64),
            theirs=np.concatenate(theirs).astype(np.float64),
            weights=frozenset(file.sha256 for file in manifest.files if file.path.endswith(".safetensors")),
        )
