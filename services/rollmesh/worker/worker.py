"""The worker: leases trajectories, runs one task per trajectory, and lets go of nothing that was saved.

lease loop   takes work while the pool has room; woken by every trajectory that ends
watch loop   desired state, newest policy, generators: parks, interrupts and raises version floors
tasks        program -> finish -> reward -> score; what goes wrong in one of them stays there
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollmesh.errors import DataError, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.mesh import Desired
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import Fork, ForkStatus, LeasedTrajectory, ReleaseReason
from rollmesh.types import OutcomeKind, RewardOutcome, SamplingParams, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked
from rollmesh.worker.generation_calls import Caller
from rollmesh.worker.generator_pool import GeneratorPool, GeneratorSlot
from rollmesh.worker.interrupts import Interrupter
from rollmesh.worker.newest_policy import NewestPolicy
from rollmesh.worker.program import Program, RolloutContext
from rollmesh.worker.saving import Saver
from rollmesh.worker.trajectory_scoring import TrajectoryScorer
from rollmesh.worker.trajectory_spans import attempt_on, end_of_trajectory
from rollmesh.worker.worker_metrics import WorkerMetrics
from rollmesh.worker.worker_session import Beat, WorkerSession

_LEASES_AT_ONCE = 64
_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 0.25
_WATCH_SECONDS = 0.05
_REGISTRY_SECONDS = 0.25
_ORPHANS_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 15.0
_LOOP_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDeps:
    """What a worker is made of."""

    store: TrajectoryStore
    session: WorkerSession
    saver: Saver
    generators: GeneratorPool
    policies: NewestPolicy
    caller: Caller
    interrupter: Interrupter
    scorer: TrajectoryScorer
    program: Program
    metrics: WorkerMetrics
    health: Health


class Worker:
    """Runs leased trajectories until shutdown."""

    def __init__(
        self,
        parts: WorkerDeps,
        *,
        params: SamplingParams,
        budget: int,
        concurrency: int,
        drain_seconds: float,
        first_pause_seconds: float = 0.5,
        new_limit: Callable[[], int] | None = None,
    ) -> None:
        """``first_pause_seconds``: how long a failed first attempt keeps its lease; doubled with every attempt.

        ``new_limit`` says how many trajectories without tokens may be leased now; None: as many as fit.
        """
        self._parts = parts
        self._params = params
        self._budget = budget
        self._concurrency = concurrency
        self._drain_seconds = drain_seconds
        self._first_pause_seconds = first_pause_seconds
        self._new_limit = new_limit
        self._desired = Desired(pool_size=0)
        self._looking = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: dict[ActiveTrajectory, None] = {}
        """Held trajectories without their last token; counted at every lease and look, so never by a walk over all."""
        self._room = asyncio.Event()
        self._draining = asyncio.Event()
        self._orphans_due = 0.0
        self._alive: Beat = lambda: parts.health.beat("lease")
        self._log = get_logger("worker")

    async def run(self, shutdown: Shutdown) -> None:
        """Work until ``shutdown``, then bring everything to rest and give it back."""
        for name in ("lease", "watch"):
            self._parts.health.watch(name, _LOOP_DEADLINE_SECONDS)
        loops = [
            asyncio.create_task(self._lease_loop(), name="lease"),
            asyncio.create_task(self._watch_loop(), name="watch"),
        ]
        stopped = asyncio.ensure_future(shutdown.wait())
        try:
            done, _ = await asyncio.wait([stopped, *loops], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            stopped.cancel()
            loops[0].cancel()
            await self._drain()
            loops[1].cancel()
            await asyncio.gather(*loops, return_exceptions=True)
            for name in ("lease", "watch"):
                self._parts.health.unwatch(name)

    def wake(self) -> None:
        """Look for work now: something has changed that the worker cannot see."""
        self._room.set()

    async def fork(self, held: ActiveTrajectory, nonce: str) -> Fork:
        """Open and hold one more member of a held trajectory's group; the same ``nonce`` gets the same one.

        Its program starts after the caller's next await.
        """

        session, asked_at = self._parts.session, 0

        async def ask(current: str) -> Fork:
            nonlocal asked_at
            asked_at = session.registrations
            return await self._parts.store.fork(current, held.trajectory_id, nonce)

        async with session.leasing:
            fork = await session.call(ask)
            if fork.leased is not None:
                await session.call(lambda _: self._look_at_desired())
                if not await self._start_all([fork.leased], asked_at, self._roll):
                    return Fork(status=ForkStatus.PAUSED)
                self._parts.metrics.leases.inc()
        return fork

    # -- work ------------------------------------------------------------------------------------------------------
    async def _lease_loop(self) -> None:
        while True:
            self._parts.health.beat("lease")
            taken, session = 0, self._parts.session.current
            try:
                # A fork that leases may wait out an outage: this loop does not wait for it.
                if not self._parts.session.leasing.locked():
                    async with self._parts.session.leasing:
                        taken = await self._lease(session)
            except StoreUnavailable as error:
                self._log.warning("lease_failed", message=str(error))
            except SessionLost:
                # Of the session that was asked with: another task may have replaced it before the answer came.
                await self._parts.session.recover(session, beat=self._alive)
            if taken == _LEASES_AT_ONCE:
                continue
            self._room.clear()
            # A trajectory that ends makes room in the pool: look again soon, together with its neighbours.
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_BUSY_SECONDS)

    async def _lease(self, session: str) -> int:
        parts = self._parts
        if time.monotonic() >= self._orphans_due:
            self._orphans_due = time.monotonic() + _ORPHANS_SECONDS
            asked_at = parts.session.registrations
            unscored = await parts.store.lease_scoring(session, _LEASES_AT_ONCE)
            await self._start_all(unscored, asked_at, self._score_only)
        limit = min(_LEASES_AT_ONCE, self._concurrency - len(self._rolling))
        if self._desired.paused or limit < 1 or not parts.generators.serving_slots:
            return 0
        new_limit = None if self._new_limit is None else self._new_limit()
        asked_at = parts.session.registrations
        leased_now = await parts.store.lease(session, limit, new_limit)
        if leased_now:
            # Groups may have been admitted under a higher floor than the one last seen: read it after the lease. It may
            # take long, but the queue counts these trajectories as ours, and nobody else would start them.
            await parts.session.call(lambda _: self._look_at_desired(), beat=self._alive)
        started = await self._start_all(leased_now, asked_at, self._roll)
        parts.metrics.leases.inc(len(started))
        parts.metrics.resumed.inc(sum(1 for leased in started if leased.trajectory.segments))
        return len(started)

    async def _start_all(
        self,
        leased: Sequence[LeasedTrajectory],
        asked_at: int,
        work: Callable[[ActiveTrajectory], Coroutine[Any, Any, None]],
    ) -> Sequence[LeasedTrajectory]:
        """Start what was leased after that many registrations; a later one has given it back, so that none starts."""
        session = self._parts.session
        if leased and session.registrations != asked_at:
            self._log.warning("lease_is_void", count=len(leased))
            ids = [each.trajectory.trajectory_id for each in leased]
            await self._parts.store.release(session.current, ids, ReleaseReason.DRAINED)
            return []
        for each in leased:
            self._start(each, work)
        return leased

    def _start(self, leased: LeasedTrajectory, work: Callable[[ActiveTrajectory], Coroutine[Any, Any, None]]) -> None:
        held = ActiveTrajectory(leased.trajectory, leased.attempt, leased.snapshot, leased.incarnation)
        held.first_lease_time = leased.first_lease_time
        held.start_floor, held.call_floor = self._desired.start_at_version, self._desired.interrupt_below_version
        if not held.finished and (self._draining.is_set() or self._desired.paused):
            # Leased in the moment before the pause or the drain, which has parked all others already.
            held.park(ReleaseReason.DRAINED if self._draining.is_set() else ReleaseReason.PAUSED)
        self._parts.session.held[held.trajectory_id] = held
        if not held.finished:
            self._rolling[held] = None
        task = asyncio.create_task(self._attempt(held, work), name=held.trajectory_id)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Nothing of one trajectory may stop the worker; its lease ends with the session at the latest."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._log.error("trajectory_task_failed", trajectory=task.get_name(), exc_info=error)

    async def _attempt(
        self, held: ActiveTrajectory, work: Callable[[ActiveTrajectory], Coroutine[Any, Any, None]]
    ) -> None:
        with attempt_on(held):
            await self._guarded(held, work)

    async def _guarded(
        self, held: ActiveTrajectory, work: Callable[[ActiveTrajectory], Coroutine[Any, Any, None]]
    ) -> None:
        parts = self._parts
        try:
            try:
                await work(held)
            except Parked as stop:
                held.span.set(parked=stop.reason.value)
                await parts.saver.save(held)
                await parts.saver.release(held.trajectory_id, stop.reason)
                parts.metrics.parked(stop.reason.value)
            except DataError as error:
                self._log.warning("trajectory_is_dead", trajectory=held.trajectory_id, message=str(error))
                parts.metrics.dropped("dead")
                await parts.saver.fail(held.trajectory_id, str(error))
                end_of_trajectory(held, "dead", 0.0)
            except LetGo:
                raise
            except RollmeshError as error:
                self._log.warning("attempt_failed", trajectory=held.trajectory_id, message=str(error))
                await self._give_up(held, str(error))
            except Exception as error:  # whatever a program of the user raises fails its attempt, not the worker
                self._log.exception("attempt_failed", trajectory=held.trajectory_id)
                await self._give_up(held, f"{type(error).__name__}: {error}")
        except LetGo as error:
            self._log.info("trajectory_let_go", trajectory=held.trajectory_id, message=str(error))
            held.span.fail(f"let go: {error}")
            parts.metrics.dropped("taken_back")
            if parts.session.held.get(held.trajectory_id) is held:
                # Mostly another worker has it by now. If the queue still counts it as ours, nobody else could take it.
                await parts.saver.release(held.trajectory_id, ReleaseReason.FAILED)
        finally:
            if parts.session.held.get(held.trajectory_id) is held:
                del parts.session.held[held.trajectory_id]
            self._rolling.pop(held, None)
            held.over = True
            held.changed()
            self._room.set()

    async def _give_up(self, held: ActiveTrajectory, message: str) -> None:
        """Let go of a failed attempt after a pause: attempts are few, and what broke this one may need a moment."""
        held.span.fail(message)
        self._parts.metrics.dropped("failed")
        pause = min(self._first_pause_seconds * 2.0 ** (held.attempt - 1), _LONGEST_PAUSE_SECONDS)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(pause):
                await self._draining.wait()
        await self._parts.saver.release(held.trajectory_id, ReleaseReason.FAILED)

    async def _roll(self, held: ActiveTrajectory) -> None:
        parts = self._parts
        rollout = RolloutContext(
            held=held,
            caller=parts.caller,
            params=self._params,
            budget=self._budget,
            save=parts.saver.save,
            report_first_token=parts.saver.report_first_token,
            restart=parts.saver.restart,
            keep_snapshot=parts.saver.keep_snapshot,
        )
        ending = await parts.program.run(rollout)
        await parts.saver.finish(held, ending.reason)
        self._rolling.pop(held, None)
        self._room.set()
        trajectory = held.result(ending.reason)
        versions = trajectory.policy_versions
        span = versions[-1] - versions[0] if versions else 0
        parts.metrics.finished(ending.reason.value, held.token_count, span)
        await self._score(held, trajectory, ending.outcome)

    async def _score_only(self, held: ActiveTrajectory) -> None:
        """A trajectory whose worker died after its last token."""
        known = await self._parts.program.outcome_of(held.trajectory, held.snapshot)
        await self._score(held, held.trajectory, known)

    async def _score(self, held: ActiveTrajectory, trajectory: Trajectory, known: RewardOutcome | None) -> None:
        with tracer().span("reward", held.traceparent, kind="client") as span:
            asked = replace(trajectory, traceparent=span.traceparent) if span.traceparent else trajectory
            result = await self._parts.scorer.score(asked, known)
            span.set(outcome=result.outcome.kind.value, shaped_reward=result.shaped_reward)
        if result.dead:
            self._parts.metrics.dropped("dead")
            await self._parts.saver.fail(held.trajectory_id, f"{result.outcome.kind}: {result.outcome.message}")
            held.recorded = True
            end_of_trajectory(held, "dead", 0.0)
            return
        await self._parts.saver.score(held, result.outcome, result.shaped_reward, assigned=result.assigned)
        held.recorded = True
        end_of_trajectory(held, result.outcome.kind.value, result.shaped_reward)
        if result.outcome.kind is not OutcomeKind.SCORED and not result.assigned:
            self._parts.metrics.dropped("unscorable")

    # -- watching --------------------------------------------------------------------------------------------------
    async def _watch_loop(self) -> None:
        registry_due = 0.0
        while True:
            self._parts.health.beat("watch")
            try:
                await self._look_at_desired()
                if time.monotonic() >= registry_due or self._parts.generators.waiting_count:
                    registry_due = time.monotonic() + _REGISTRY_SECONDS
                    await self._parts.policies.refresh()
                    await self._parts.generators.follow(self._desired.registry_version)
            except StoreUnavailable as error:
                self._log.warning("watch_failed", message=str(error))
            self._observe()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _look_at_desired(self) -> None:
        async with self._looking:  # or the older of two answers could be the last to come
            before, now = self._desired, await self._parts.store.desired()
            self._desired = now
        if now == before:
            return
        rolling = list(self._rolling)
        for held in rolling:
            held.start_floor, held.call_floor = now.start_at_version, now.interrupt_below_version
        if now.paused and not before.paused:
            self._park(ReleaseReason.PAUSED)
        if before.paused and not now.paused:
            for held in rolling:
                held.unpark()
            self._room.set()
        if now.interrupt_below_version > before.interrupt_below_version:
            records = self._parts.generators.records
            old = [
                seat
                for seat in self._seats()
                if (record := records.get(seat.record.instance_id)) is not None
                and record.policy_version < now.interrupt_below_version
            ]
            self._parts.interrupter.start(old)

    def _park(self, reason: ReleaseReason) -> None:
        for held in list(self._rolling):
            held.park(reason)
        self._parts.generators.wake()
        self._parts.interrupter.start(self._seats())

    def _seats(self) -> list[GeneratorSlot]:
        """Calls of leased trajectories; evaluation has its own."""
        held = self._parts.session.held
        return [s for s in self._parts.generators.seats if held.get(s.held.trajectory_id) is s.held]

    def _observe(self) -> None:
        metrics, rolling = self._parts.metrics, len(self._rolling)
        metrics.in_flight.set(rolling)
        metrics.awaiting_reward.set(len(self._parts.session.held) - rolling)
        metrics.awaiting_generator.set(self._parts.generators.waiting_count)
        metrics.generators_avoided.set(self._parts.generators.avoided_count())

    async def _drain(self) -> None:
        """Tokens in flight are saved as partial trajectories; what has not come to rest in time is cut off."""
        self._draining.set()
        self._park(ReleaseReason.DRAINED)
        rolling = [task for task in self._tasks if not self._is_finished(task)]
        if rolling:
            await asyncio.wait(rolling, timeout=self._drain_seconds)
        left = [task for task in self._tasks if task.cancel()]
        await asyncio.gather(*left, return_exceptions=True)
        self._log.info("drained", parked=len(rolling), cut_off=len(left))

    def _is_finished(self, task: asyncio.Task[None]) -> bool:
        held = self._parts.session.held.get(task.get_name())
        return held is None or held.finished
