"""Worker: leases trajectories and runs one task per trajectory; saved tokens are never lost.

lease loop   leases work while the pool has room; woken by every trajectory that ends
watch loop   reads desired state, newest policy and generators; parks, interrupts and raises version floors
tasks        program -> finish -> reward -> score; an error in one task does not affect the others
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from typing import Any, Protocol

from rollmesh.errors import DataError, RollmeshError, SessionLost, StoreUnavailable
from rollmesh.mesh import Desired
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tasks import BackgroundTasks, Backoff, cancel_and_wait, cancelled_awaits_as_errors
from rollmesh.runtime.tracing import tracer
from rollmesh.store.queue_types import Fork, LeasedTrajectory, ReleaseReason
from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.user_code import described
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo, Parked, attempt_on, end_of_trajectory
from rollmesh.worker.build import WorkerDeps, WorkerSettings
from rollmesh.worker.generator_pool import GeneratorSlot
from rollmesh.worker.program import RolloutContext
from rollmesh.worker.worker_session import Beat

Work = Callable[[ActiveTrajectory], Coroutine[Any, Any, None]]

_LEASES_AT_ONCE = 64
_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 0.25
_WATCH_SECONDS = 0.05
_REGISTRY_SECONDS = 0.25
_ORPHANS_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 15.0
_LOOP_DEADLINE_SECONDS = 120.0


class Demand(Protocol):
    """Demand for trajectories without tokens, where they are leased one by one for clients that wait for them."""

    @property
    def work_due(self) -> asyncio.Event:
        """Set when the demand rises: the worker then leases at once."""

    def wanted(self) -> int:
        """Return the number of trajectories without tokens that may be leased now."""

    def lease_attempted(self, leased_count: int) -> None:
        """Record that the queue has answered the worker's request for work."""


class Worker:
    """Worker that runs leased trajectories until shutdown."""

    def __init__(self, settings: WorkerSettings, deps: WorkerDeps, demand: Demand | None = None) -> None:
        """Set up a worker; ``demand`` limits the trajectories without tokens that it leases."""
        self._settings = settings
        self._deps = deps
        self._failed_attempt = Backoff(
            first_seconds=settings.first_pause_seconds, longest_seconds=_LONGEST_PAUSE_SECONDS
        )
        self._demand = demand
        self._desired = Desired(pool_size=0)
        self._desired_lock = asyncio.Lock()
        self._tasks = BackgroundTasks()
        self._unfinished: dict[ActiveTrajectory, None] = {}
        """Leased trajectories without their last token; kept apart because they are counted at every lease."""
        self._room = asyncio.Event() if demand is None else demand.work_due
        self._draining = asyncio.Event()
        self._orphans_due = 0.0
        self._alive: Beat = lambda: deps.health.beat("lease")
        self._log = get_logger("worker")

    async def run(self, shutdown: Shutdown) -> None:
        """Work until ``shutdown``, then save unfinished trajectories as partial and release them."""
        for name in ("lease", "watch"):
            self._deps.health.watch(name, _LOOP_DEADLINE_SECONDS)
        lease = asyncio.create_task(self._lease_loop(), name="lease")
        watch = asyncio.create_task(self._watch_loop(), name="watch")
        stopped = asyncio.ensure_future(shutdown.wait())
        try:
            done, _ = await asyncio.wait([stopped, lease, watch], return_when=asyncio.FIRST_COMPLETED)
            for task in done - {stopped}:
                task.result()
        finally:
            await cancel_and_wait(stopped, lease)
            await self._drain()
            await cancel_and_wait(watch)
            for name in ("lease", "watch"):
                self._deps.health.unwatch(name)

    async def fork(self, active: ActiveTrajectory, nonce: str) -> Fork:
        """Open and lease one more member of a leased trajectory's group; the same ``nonce`` returns the same member.

        Its program starts after the caller's next await.
        """
        session, registrations_before = self._deps.session, 0

        async def request_fork(current: str) -> Fork:
            nonlocal registrations_before
            registrations_before = session.registrations
            return await self._deps.store.trajectories.fork(current, active.trajectory_id, nonce)

        async with session.leasing:
            while True:
                fork = await session.call(request_fork)
                if fork.leased is None:
                    return fork
                await session.call(lambda _: self._read_desired())
                # A registration has released the member: the same request leases it again.
                if await self._start_all([fork.leased], registrations_before, self._run_program):
                    self._deps.metrics.leases.inc()
                    return fork

    # -- work ------------------------------------------------------------------------------------------------------
    async def _lease_loop(self) -> None:
        while True:
            self._deps.health.beat("lease")
            taken, session = 0, self._deps.session.current
            try:
                # A fork in progress may wait for the end of an outage; this loop does not wait for it.
                if not self._deps.session.leasing.locked():
                    async with self._deps.session.leasing:
                        taken = await self._lease(session)
            except StoreUnavailable as error:
                self._log.warning("lease_failed", message=str(error))
            except SessionLost:
                # Recover the session of the request: another task may have replaced it before the answer arrived.
                await self._deps.session.recover(session, beat=self._alive)
            if taken == _LEASES_AT_ONCE:
                continue
            self._room.clear()
            # A trajectory that ends makes room in the pool: lease again soon, for several ended ones at once.
            try:
                async with asyncio.timeout(_IDLE_SECONDS):
                    await self._room.wait()
            except TimeoutError:
                continue
            await asyncio.sleep(_BUSY_SECONDS)

    async def _lease(self, session: str) -> int:
        deps = self._deps
        if time.monotonic() >= self._orphans_due:
            self._orphans_due = time.monotonic() + _ORPHANS_SECONDS
            registrations_before = deps.session.registrations
            unscored = await deps.store.trajectories.lease_scoring(session, _LEASES_AT_ONCE)
            await self._start_all(unscored, registrations_before, self._score_only)
        limit = min(_LEASES_AT_ONCE, self._settings.concurrency - len(self._unfinished))
        if self._desired.paused or limit < 1 or not deps.generators.serving_slots:
            return 0
        new_limit = None if self._demand is None else self._demand.wanted()
        registrations_before = deps.session.registrations
        leased_now = await deps.store.trajectories.lease(session, limit, new_limit)
        if self._demand is not None:
            self._demand.lease_attempted(len(leased_now))
        if leased_now:
            # Groups may have been admitted under a higher floor than the one last read: read it after the lease. This
            # may take long, but the lease is ours, and no other worker would start these trajectories.
            await deps.session.call(lambda _: self._read_desired(), beat=self._alive)
        started = await self._start_all(leased_now, registrations_before, self._run_program)
        deps.metrics.leases.inc(len(started))
        deps.metrics.resumed.inc(sum(1 for leased in started if leased.trajectory.segments))
        return len(started)

    async def _start_all(
        self, leased: Sequence[LeasedTrajectory], registrations_before: int, work: Work
    ) -> Sequence[LeasedTrajectory]:
        """Start the leased trajectories, unless a registration after the request has released them."""
        session = self._deps.session
        if leased and session.registrations != registrations_before:
            self._log.warning("lease_is_void", count=len(leased))
            ids = [each.trajectory.trajectory_id for each in leased]
            await self._deps.store.trajectories.release(session.current, ids, ReleaseReason.DRAINED)
            return []
        for each in leased:
            self._start(each, work)
        return leased

    def _start(self, leased: LeasedTrajectory, work: Work) -> None:
        active = ActiveTrajectory(
            leased.trajectory,
            attempt=leased.attempt,
            snapshot=leased.snapshot,
            incarnation=leased.incarnation,
            first_lease_time=leased.first_lease_time,
            plan=leased.plan,
        )
        active.set_floors(start=self._desired.start_at_version, call=self._desired.interrupt_below_version)
        if not active.finished and (self._draining.is_set() or self._desired.paused):
            # Leased just before the pause or the drain, which has parked all other trajectories already.
            active.park(ReleaseReason.DRAINED if self._draining.is_set() else ReleaseReason.PAUSED)
        if (earlier := self._deps.session.trajectories.get(active.trajectory_id)) is not None:
            # Its group has begun again: the queue knows the lease by session and id, and would take a late score.
            earlier.lose("the trajectory has begun again under another lease")
        self._deps.session.trajectories[active.trajectory_id] = active
        if not active.finished:
            self._unfinished[active] = None
        self._tasks.start(self._attempt(active, work), active.trajectory_id)

    async def _attempt(self, active: ActiveTrajectory, work: Work) -> None:
        try:
            with attempt_on(active):
                await self._guarded(active, work)
        except Exception as error:  # the worker continues, and the lease expires with the session
            self._log.error("trajectory_task_failed", trajectory=active.trajectory_id, exc_info=error)

    async def _guarded(self, active: ActiveTrajectory, work: Work) -> None:
        deps = self._deps
        try:
            try:
                with cancelled_awaits_as_errors():
                    await work(active)
            except Parked as stop:
                active.span.set(parked=stop.reason.value)
                await deps.saver.save(active)
                active.check_lost()
                await deps.saver.release(active.trajectory_id, stop.reason)
                deps.metrics.parked.labels(reason=stop.reason.value).inc()
            except DataError as error:
                self._log.warning("trajectory_is_dead", trajectory=active.trajectory_id, message=str(error))
                active.check_lost()
                deps.metrics.drops.labels(reason="dead").inc()
                await deps.saver.fail(active.trajectory_id, str(error))
                end_of_trajectory(active, "dead", 0.0)
            except LetGo:
                raise
            except RollmeshError as error:
                self._log.warning("attempt_failed", trajectory=active.trajectory_id, message=str(error))
                await self._give_up(active, str(error))
            except Exception as error:  # an error in a user's program fails the attempt, not the worker
                self._log.exception("attempt_failed", trajectory=active.trajectory_id)
                await self._give_up(active, described(error))
        except LetGo as error:
            self._log.info("trajectory_let_go", trajectory=active.trajectory_id, message=str(error))
            active.span.fail(f"let go: {error}")
            deps.metrics.drops.labels(reason="taken_back").inc()
            if deps.session.trajectories.get(active.trajectory_id) is active:
                # Usually another worker has leased it. If the queue still counts it as ours, no worker could lease it.
                await deps.saver.release(active.trajectory_id, ReleaseReason.FAILED)
        finally:
            if deps.session.trajectories.get(active.trajectory_id) is active:
                del deps.session.trajectories[active.trajectory_id]
            self._unfinished.pop(active, None)
            active.close()
            self._room.set()

    async def _give_up(self, active: ActiveTrajectory, message: str) -> None:
        """Release a failed attempt after a pause: attempts are few, and the cause of the failure may pass."""
        active.span.fail(message)
        self._deps.metrics.drops.labels(reason="failed").inc()
        await wait_or_shutdown(self._draining, self._failed_attempt.seconds(active.attempt))
        active.check_lost()
        await self._deps.saver.release(active.trajectory_id, ReleaseReason.FAILED)

    async def _run_program(self, active: ActiveTrajectory) -> None:
        deps = self._deps
        budget = await deps.budgets.of(active.trajectory)
        rollout = RolloutContext(
            active=active,
            caller=deps.caller,
            params=self._settings.params,
            budget=budget.tokens,
            turns=budget.turns,
            save=deps.saver.save,
            report_first_token=deps.saver.report_first_token,
            restart=deps.saver.restart,
            keep_snapshot=deps.saver.keep_snapshot,
        )
        result = await deps.program.run(rollout)
        await deps.saver.finish(active, result.reason)
        self._unfinished.pop(active, None)
        self._room.set()
        trajectory = active.result(result.reason)
        versions = trajectory.policy_versions
        span = versions[-1] - versions[0] if versions else 0
        deps.metrics.finished(result.reason.value, active.token_count, span)
        await self._score(active, trajectory, result.outcome)

    async def _score_only(self, active: ActiveTrajectory) -> None:
        """Score a trajectory whose worker died after the last token."""
        known = await self._deps.program.outcome_of(active.trajectory, active.snapshot)
        await self._score(active, active.trajectory, known)

    async def _score(self, active: ActiveTrajectory, trajectory: Trajectory, known: RewardOutcome | None) -> None:
        with tracer().span("reward", active.traceparent, kind="client") as span:
            traced = replace(trajectory, traceparent=span.traceparent) if span.traceparent else trajectory
            budget = await self._deps.budgets.of(trajectory)
            result = await self._deps.scorer.score_for_training(traced, known, budget.tokens)
            span.set(outcome=result.outcome.kind.value, shaped_reward=result.shaped_reward)
        active.check_lost()
        if result.dead:
            self._deps.metrics.drops.labels(reason="dead").inc()
            await self._deps.saver.fail(active.trajectory_id, f"{result.outcome.kind}: {result.outcome.message}")
            active.recorded = True
            end_of_trajectory(active, "dead", 0.0)
            return
        await self._deps.saver.score(active, result)
        active.recorded = True
        end_of_trajectory(active, result.outcome.kind.value, result.shaped_reward)
        if not result.has_value:
            self._deps.metrics.drops.labels(reason="unscorable").inc()

    # -- watching --------------------------------------------------------------------------------------------------
    async def _watch_loop(self) -> None:
        registry_due = 0.0
        while True:
            self._deps.health.beat("watch")
            try:
                await self._read_desired()
                if time.monotonic() >= registry_due or self._deps.generators.waiting_count:
                    registry_due = time.monotonic() + _REGISTRY_SECONDS
                    await self._deps.policies.refresh()
                    await self._deps.generators.follow(self._desired.registry_version)
                    if (version := self._deps.generators.unserved_version()) is not None:
                        await self._deps.store.policies.require(version)
            except StoreUnavailable as error:
                self._log.warning("watch_failed", message=str(error))
            if (refused := self._deps.scorer.refused) is not None:
                raise refused
            self._observe()
            await asyncio.sleep(_WATCH_SECONDS)

    async def _read_desired(self) -> None:
        async with self._desired_lock:  # otherwise the older of two answers could arrive last
            before, now = self._desired, await self._deps.store.leadership.desired()
            self._desired = now
        if now == before:
            return
        unfinished = list(self._unfinished)
        for active in unfinished:
            active.set_floors(start=now.start_at_version, call=now.interrupt_below_version)
        if now.paused and not before.paused:
            self._park(ReleaseReason.PAUSED)
        if before.paused and not now.paused:
            for active in unfinished:
                active.unpark()
            self._room.set()
        if now.interrupt_below_version > before.interrupt_below_version:
            records = self._deps.generators.records
            below = {name for name, each in records.items() if each.policy_version < now.interrupt_below_version}
            self._deps.interrupter.start([slot for slot in self._slots() if slot.record.instance_id in below])

    def _park(self, reason: ReleaseReason) -> None:
        for active in list(self._unfinished):
            active.park(reason)
        self._deps.generators.wake()
        self._deps.interrupter.start(self._slots())

    def _slots(self) -> list[GeneratorSlot]:
        """Return the slots of leased trajectories, without those of evaluations."""
        leased = self._deps.session.trajectories
        return [s for s in self._deps.generators.occupied_slots if leased.get(s.active.trajectory_id) is s.active]

    def _observe(self) -> None:
        metrics, unfinished = self._deps.metrics, len(self._unfinished)
        metrics.in_flight.set(unfinished)
        metrics.awaiting_reward.set(len(self._deps.session.trajectories) - unfinished)
        metrics.awaiting_generator.set(self._deps.generators.waiting_count)
        metrics.generators_avoided.set(self._deps.generators.avoided_count())

    async def _drain(self) -> None:
        """Save unfinished trajectories as partial; cancel those that take longer than the drain time."""
        self._draining.set()
        self._park(ReleaseReason.DRAINED)
        unfinished_ids = {active.trajectory_id for active in self._unfinished}
        unfinished = [task for task in self._tasks if task.get_name() in unfinished_ids]
        if unfinished:
            await asyncio.wait(unfinished, timeout=self._settings.drain_seconds)
        left = [task for task in self._tasks if not task.done()]
        await cancel_and_wait(*left)
        self._log.info("drained", parked=len(unfinished), cut_off=len(left))
