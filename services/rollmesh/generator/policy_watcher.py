"""The loop that finds the newest policy version and loads it, and the generator's turn to do so.

    consumes     announced policies (store)
    produces     the policy in the engine (policy_loader); the generator's serving state
    waits for    a version that the rules want (scheduling/next_policy.py), or its turn to load it
    unblocked by the trainer's announcement, a pin, the leader's version floor, the end of another generator's load

If a policy cannot be served, the old weights keep serving and the reason is logged and counted.
"""

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator

from rollmesh.errors import CheckpointError, DataError, EngineError, Reason, StoreUnavailable
from rollmesh.generator.canary import CanaryFailed
from rollmesh.generator.engines.engine_protocol import EngineLost
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.policy_loader import PolicyLoader
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.health import Health
from rollmesh.runtime.logging import get_logger, note_policy_version
from rollmesh.runtime.tasks import BackgroundTasks, Backoff, cancel_and_wait
from rollmesh.runtime.tracing import tracer
from rollmesh.scheduling.next_policy import ReloadRules, next_policy
from rollmesh.store.generator_registry import ReloadLeases
from rollmesh.store.policy_registry import PolicyRegistry
from rollmesh.types import PolicyRecord

LOOP_NAME = "policies"
_STALLED_AFTER_SECONDS = 1800.0
_PIN_POLL_SECONDS = 0.5
"""Time between two checks for a pin, which is not announced."""
_BACKOFF = Backoff(first_seconds=1.0, longest_seconds=10.0)
_WAIT = "policy"
_RENEWALS = 3
"""Renewals within one time to live."""
_LAST_RENEWAL_SECONDS = 1.0
"""Time for a renewal on its way at the end of a load: applied after the end, it would leave a lease behind."""
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
        loader: PolicyLoader,
        registry: PolicyRegistry,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        health: Health,
        *,
        rules: ReloadRules,
        turns: "ReloadTurns",
    ) -> None:
        self._loader = loader
        self._registry = registry
        self._serving_state = serving_state
        self._metrics = metrics
        self._health = health
        self._rules = rules
        self._turns = turns
        self._served: PolicyRecord | None = None
        """Announcement of the policy in service."""
        self._settled: PolicyRecord | None = None
        self._newest_seen = -1
        self._lock = asyncio.Lock()
        self._requested = BackgroundTasks()
        """Loads requested through ``load_version``."""
        self._log = get_logger("policies")

    async def run(self) -> None:
        self._health.watch(LOOP_NAME, _STALLED_AFTER_SECONDS)
        failure_count = 0
        try:
            while True:
                self._health.beat(LOOP_NAME)
                retry_seconds = _BACKOFF.seconds(failure_count + 1)
                try:
                    settled = await self._load_if_changed()
                except StoreUnavailable as error:
                    self._metrics.reload_failures.labels(reason="store").inc()
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

        def ended(load: asyncio.Task[None]) -> None:
            if not load.cancelled() and isinstance(error := load.exception(), Exception):
                self._refused(record, error)

        load.add_done_callback(ended)
        await asyncio.shield(load)
        return record.policy_version

    async def _load_if_changed(self) -> bool:
        """Load the policy that the rules want; return False if the load must be retried soon."""
        outlook = await self._registry.outlook(self._serving_state.instance_id)
        choice = next_policy(
            self._served,
            outlook.newest,
            outlook.pinned,
            self._rules,
            required_version=outlook.required_version,
            in_rotation=not (self._loader.unchecked or self._serving_state.out_of_rotation),
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
        try:
            await self._load(record)
        except CheckpointError as error:
            self._refused(record, error)
            if error.reason == Reason.REFUSED and not self._serving_state.started:
                raise  # without an older policy to serve, the process ends, and with it the run
            if error.reason in _RETRIED_REASONS:
                return False
        except EngineError as error:
            if isinstance(error, EngineLost):
                self._serving_state.take_out_of_service(str(error))
            self._refused(record, error)
            if isinstance(error, EngineLost) or not self._serving_state.started:
                # The engine cannot recover, or no older policy serves: the process exits. A final error ends the run.
                raise
        self._settled = record
        return True

    def _refused(self, record: PolicyRecord, error: Exception) -> None:
        reason = "canary" if isinstance(error, CanaryFailed) else "engine"
        if isinstance(error, CheckpointError):
            reason = error.reason
        self._metrics.reload_failures.labels(reason=reason).inc()
        self._health.waits.begin(_WAIT, f"policy version {record.policy_version}: {error}")
        if not (isinstance(error, CheckpointError) and error.outside):
            self._serving_state.refuse(record.policy_version, f"{reason}: {error}", retried=reason in _RETRIED_REASONS)
        old = self._loader.serving
        self._log.error(
            "policy_refused",
            policy_version=record.policy_version,
            reason=reason,
            message=str(error),
            still_serving=None if old is None else old.manifest.policy_version,
            out_of_rotation=self._serving_state.reason,
        )

    async def _load(self, record: PolicyRecord) -> None:
        """Load a policy unless it serves; CheckpointError or EngineError if that fails, and the old one stays."""
        async with self._lock:
            serving = self._loader.serving
            same = serving is not None and serving.manifest.policy_version == record.policy_version
            if same and not self._loader.unchecked:
                self._serving_state.put_in_service()
                return
            step = tracer().train_step(record.train_step)
            with (
                tracer().span("policy_load", step, kind="consumer", policy_version=record.policy_version),
                # The checkpoint that is being loaded is not pruned, even if newer versions follow.
                self._serving_state.loading(record.policy_version),
            ):
                await self._loader.load(record)
            self._served = record
        self._health.waits.end(_WAIT)
        self._serving_state.accept(record.policy_version)
        note_policy_version(record.policy_version)


class ReloadTurns:
    """Turns of one generator; without ``at_once`` every load begins at once and Redis is not asked."""

    def __init__(
        self, leases: ReloadLeases, instance_id: str, metrics: GeneratorMetrics, *, at_once: int | None, ttl: float
    ) -> None:
        self._leases = leases
        self._instance_id = instance_id
        self._metrics = metrics
        self._at_once = at_once
        self._ttl = ttl
        self._waiting_since: float | None = None
        self._log = get_logger("reload_turn")

    @contextlib.asynccontextmanager
    async def turn(self, policy_version: int, *, urgent: bool) -> AsyncIterator[bool]:
        """Hold a turn for the block; yields False if other generators load and this one must ask again later.

        An ``urgent`` load never waits, but counts for the others. The lease of a killed generator ends with its time
        to live, so a wait lasts at most as long as the loads of the holders, or that time.
        """
        if self._at_once is None:
            yield True
            return
        token = f"{self._instance_id}:{secrets.token_hex(16)}"
        holders = await self._leases.begin(token, at_once=self._at_once, ttl=self._ttl, above_limit=urgent)
        if holders:
            if self._waiting_since is None:
                self._waiting_since = time.monotonic()
                self._metrics.reload_waiting.set(1)
                self._log.info(
                    "reload_waits",
                    policy_version=policy_version,
                    for_generators=[holder.token.partition(":")[0] for holder in holders],
                    lease_seconds=round(max(holder.seconds_left for holder in holders), 3),
                )
            yield False
            return
        waited = 0.0 if self._waiting_since is None else time.monotonic() - self._waiting_since
        self._metrics.reload_wait_seconds.observe(waited)
        self.clear()
        loaded = asyncio.Event()
        renewing = asyncio.create_task(self._renew(token, self._at_once, loaded), name="reload-lease")
        try:
            yield True
        finally:
            loaded.set()
            await asyncio.wait({renewing}, timeout=_LAST_RENEWAL_SECONDS)
            await cancel_and_wait(renewing)
            # Its time to live ends the lease if the store is unreachable.
            with contextlib.suppress(StoreUnavailable):
                await self._leases.end(token)

    def clear(self) -> None:
        self._waiting_since = None
        self._metrics.reload_waiting.set(0)

    async def _renew(self, token: str, at_once: int, loaded: asyncio.Event) -> None:
        while not loaded.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._ttl / _RENEWALS):
                    await loaded.wait()
                    return
            with contextlib.suppress(StoreUnavailable):
                # Above the limit: a lease that has expired meanwhile must count again, since the load goes on.
                await self._leases.begin(token, at_once=at_once, ttl=self._ttl, above_limit=True)
