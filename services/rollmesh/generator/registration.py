"""The generator's entry in the registry: identity, policy version and load, renewed with every heartbeat."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rollmesh.config.store import StoreConfig
from rollmesh.errors import StoreUnavailable
from rollmesh.generator.engines.engine_protocol import Engine, EngineStatus
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.generator.serving_state import ServingState
from rollmesh.runtime.grpc import HealthReporter
from rollmesh.runtime.health import Health
from rollmesh.runtime.logging import get_logger
from rollmesh.store.generator_registry import GeneratorRegistry
from rollmesh.types import GeneratorRecord, GeneratorWork

LOOP_NAME = "heartbeat"
_MISSED_HEARTBEATS = 12


class Registration:
    """The registry entry of one generator."""

    def __init__(
        self,
        registry: GeneratorRegistry,
        engine: Engine,
        serving_state: ServingState,
        metrics: GeneratorMetrics,
        health: Health,
        reporter: HealthReporter,
        config: StoreConfig,
    ) -> None:
        self._registry = registry
        self._engine = engine
        self._serving_state = serving_state
        self._metrics = metrics
        self._health = health
        self._reporter = reporter
        self._heartbeat_seconds = config.heartbeat_seconds
        self._ttl_seconds = config.session_ttl_seconds
        self._log = get_logger("registration")
        self._slot_seconds = 0.0
        self._slots_since = (0, time.monotonic())
        """Serving slots at the last update, and the time of that update (monotonic seconds)."""

    def record(self) -> GeneratorRecord:
        """Build the current entry; EngineError if the engine has failed."""
        serving_state = self._serving_state
        status = self._engine.status() if serving_state.started else EngineStatus()
        waits = self._health.waits.text()
        return GeneratorRecord(
            instance_id=serving_state.instance_id,
            address=serving_state.address,
            policy_version=status.policy_version,
            running_count=status.running_count,
            waiting_count=status.waiting_count,
            slot_count=status.slot_count,
            kv_tokens_used=status.kv_tokens_used,
            kv_token_capacity=status.kv_token_capacity,
            preemption_total=status.preemption_total,
            serving=not serving_state.reason,
            reason="; ".join(filter(None, (serving_state.reason, waits if serving_state.reason else ""))),
            loading_version=serving_state.loading_version,
            refused_version=serving_state.refused_version,
            refused_count=serving_state.refused_count,
            refused_reason=serving_state.refused_reason,
            work=GeneratorWork(
                prefill_tokens=status.prefill_token_total,
                reprefill_tokens=status.reprefill_token_total,
                running_slot_seconds=round(status.running_slot_seconds_total, 3),
                slot_seconds=round(self._slot_time(0 if serving_state.reason else status.slot_count), 3),
                generated_tokens=status.generated_token_total,
            ),
        )

    def _slot_time(self, serving_slots: int) -> float:
        """Return the integral of serving slots over time until now; ``serving_slots`` apply from now on."""
        slots, since = self._slots_since
        now = time.monotonic()
        self._slot_seconds += slots * (now - since)
        self._slots_since = serving_slots, now
        return self._slot_seconds

    async def run(self) -> None:
        """Renew the entry until cancelled, and immediately after every change.

        Raises EngineError if the engine has failed.
        """
        self._health.watch(LOOP_NAME, _MISSED_HEARTBEATS * self._heartbeat_seconds)
        while True:
            self._serving_state.changed.clear()
            await self.renew()
            # Not wait_for: Python 3.11's swallows a cancellation that arrives together with the event.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._heartbeat_seconds):
                    await self._serving_state.changed.wait()

    async def renew(self) -> None:
        """Write the entry now; an unreachable store is logged and counted, and calls continue."""
        record = self.record()
        self._health.set_ready(record.serving, record.reason)
        await self._reporter.set_serving(record.serving)
        self._metrics.heartbeats.inc()
        try:
            await self._registry.register(record, self._ttl_seconds)
        except StoreUnavailable as error:
            self._metrics.heartbeat_failures.inc()
            self._log.warning("heartbeat_failed", message=str(error))
        self._health.beat(LOOP_NAME)

    async def leave(self) -> None:
        """Delete the entry; if the store is unreachable, the entry expires after its time to live."""
        self._health.unwatch(LOOP_NAME)
        self._health.set_ready(False, "draining")
        await self._reporter.set_serving(False)
        try:
            await self._registry.deregister(self._serving_state.instance_id)
        except StoreUnavailable as error:
            self._log.warning("deregistration_failed", message=str(error), gone_after_seconds=self._ttl_seconds)
