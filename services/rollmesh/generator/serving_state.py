"""State in which a generator serves, and its entry in the registry: identity, policy version and load."""

import asyncio
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from rollmesh.config.store import StoreConfig
from rollmesh.errors import GenerationRefused, RollmeshError, StoreUnavailable
from rollmesh.generator.engines.engine_protocol import Engine, EngineStatus
from rollmesh.generator.generator_metrics import GeneratorMetrics
from rollmesh.runtime.grpc import HealthReporter
from rollmesh.runtime.health import Health
from rollmesh.runtime.logging import get_logger
from rollmesh.store.generator_registry import GeneratorRegistry
from rollmesh.types import GeneratorRecord, GeneratorWork

LOOP_NAME = "heartbeat"
_MISSED_HEARTBEATS = 12
_STRAGGLER_SECONDS = 0.2
"""Time between two interruptions, for admitted calls that have not reached the engine yet."""


@dataclass(slots=True)
class ServingState:
    """Identity and admission state; changed in one asyncio loop."""

    address: str = ""
    """host:port of the gRPC server."""
    instance_id: str = field(default_factory=lambda: secrets.token_hex(16))
    """Random id of this process: addresses are reused, instance ids are not."""
    drained: asyncio.Event = field(default_factory=asyncio.Event)
    """Set at shutdown or by a drain request; no call is accepted after that."""
    reloading: bool = False
    """True while running calls finish before the next policy is loaded; no call is accepted until then."""
    started: bool = False
    """True once the engine runs."""
    loading_version: int | None = None
    """Policy version in progress of being verified and loaded."""
    out_of_rotation: str = "no policy has been loaded yet"
    """Reason not to serve the policy in the engine; empty if it may be served."""
    refused_version: int | None = None
    """Last rejected version; None once that one or a newer one is served."""
    refused_count: int = 0
    """Consecutive rejected versions up to ``refused_version``; 0 while that one is retried."""
    refused_reason: str = ""
    """Reason of the last rejection."""
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set on every change, so that the registry is updated immediately."""
    _counted_version: int = -1
    _refused_in_a_row: int = 0
    _call_count: int = 0
    _idle: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def draining(self) -> bool:
        return self.drained.is_set()

    @property
    def reason(self) -> str:
        """Reason to reject calls; empty while the generator serves."""
        if self.draining:
            return "draining"
        return self.out_of_rotation or ("waiting for running calls before a reload" if self.reloading else "")

    @contextmanager
    def admitted(self) -> Iterator[None]:
        """Count one call for the duration of the block; GenerationRefused if no calls are accepted."""
        if self.reason:
            raise GenerationRefused(f"generator {self.instance_id} accepts no calls: {self.reason}")
        self._call_count += 1
        try:
            yield
        finally:
            self._call_count -= 1
            if not self._call_count:
                self._idle.set()

    @contextmanager
    def loading(self, version: int) -> Iterator[None]:
        """Mark the checkpoint of ``version`` as in use while it is verified and loaded in this block."""
        self.loading_version = version
        self.changed.set()
        try:
            yield
        finally:
            self.loading_version = None
            self.changed.set()

    async def until_idle(self) -> None:
        while self._call_count:
            self._idle.clear()
            await self._idle.wait()

    async def interrupt_all(self, engine: Engine) -> int:
        """End every admitted call as interrupted; returns the number of calls ended. Admission must be closed."""
        count = 0
        while self._call_count:
            try:
                count += await engine.interrupt()
            except RollmeshError as error:  # a failed engine has already sent the error to its callers
                get_logger("generator").warning("interrupt_failed", message=str(error))
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(_STRAGGLER_SECONDS):
                    await self.until_idle()
        return count

    def drain(self) -> None:
        self.drained.set()
        self.changed.set()

    def set_reloading(self, reloading: bool) -> None:
        """Reject calls before a draining reload, or accept them again after it."""
        self.reloading = reloading
        self.changed.set()

    def put_in_service(self) -> None:
        """Accept calls: a checked policy is in the engine."""
        self.started = True
        self.out_of_rotation = ""
        self.changed.set()

    def refuse(self, version: int, reason: str, *, retried: bool) -> None:
        """Record a version that cannot be served.

        It counts once, and not while it is ``retried``: its shared folder may only lag behind.
        """
        if not retried and version > self._counted_version:
            self._counted_version = version
            self._refused_in_a_row += 1
        self.refused_version, self.refused_reason = version, reason
        self.refused_count = 0 if retried else self._refused_in_a_row
        self.changed.set()

    def accept(self, version: int) -> None:
        """Record a served version and clear the rejections of older ones."""
        if self.refused_version is not None and version >= self.refused_version:
            self.refused_version, self.refused_count, self.refused_reason = None, 0, ""
            self._refused_in_a_row = 0
            self.changed.set()

    def take_out_of_service(self, reason: str) -> None:
        self.started = True
        self.out_of_rotation = reason
        self.changed.set()


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
        """Integral of serving slots over time."""
        self._slots_since = (0, time.monotonic())
        """Serving slots at the last update, and the time of that update (monotonic seconds)."""

    def record(self) -> GeneratorRecord:
        """Build the current entry; EngineError if the engine has failed."""
        serving_state = self._serving_state
        status = self._engine.status() if serving_state.started else EngineStatus()
        waits = self._health.waits.text()
        drafts = status.speculation
        slots, since = self._slots_since
        self._slots_since = 0 if serving_state.reason else status.slot_count, time.monotonic()
        self._slot_seconds += slots * (self._slots_since[1] - since)
        return GeneratorRecord(
            instance_id=serving_state.instance_id,
            address=serving_state.address,
            policy_version=status.policy_version,
            running_count=status.running_count,
            waiting_count=status.waiting_count,
            slot_count=status.slot_count,
            kv_tokens_used=status.kv_tokens_used,
            draft_bytes=0 if drafts is None else drafts.draft_bytes,
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
                slot_seconds=round(self._slot_seconds, 3),
                generated_tokens=status.generated_token_total,
                speculation={} if drafts is None else drafts.by_name(),
            ),
        )

    async def run(self) -> None:
        """Renew the entry until cancelled, and immediately after every change.

        Raises EngineError if the engine has failed.
        """
        self._health.watch(LOOP_NAME, _MISSED_HEARTBEATS * self._heartbeat_seconds)
        while True:
            self._serving_state.changed.clear()
            await self.renew()
            # Not wait_for: Python 3.11's swallows a cancellation that arrives together with the event.
            with suppress(TimeoutError):
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
