"""Leader of the mesh: the replica that reads the state of the mesh, decides, and writes the decisions to the store.

Every write carries the leader's token, so a stalled replica that has lost the lead changes nothing. Decisions depend
on the current view only: a new leader decides again on all that the previous leader left incomplete.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, replace

from rollmesh.errors import Conflict, DataError, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, Decisions, Desired, MeshView
from rollmesh.rollout.evaluation.periodic import PeriodicEvaluations
from rollmesh.rollout.prompt_opening import OpenPrompts, open_prompts
from rollmesh.rollout.refused_policies import RefusedPolicies
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.scheduling import Schedule, decide, needs_groups
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import NewGroup
from rollmesh.tasks.sources.source_protocol import PromptSource

_BUSY_SECONDS = 0.1
"""Seconds between the starts of two decisions after a change: at most ten decisions a second."""
_IDLE_SECONDS = 0.25
_REST_SECONDS = 0.05
"""Shortest pause after a decision, even a slow one: the other loops of the process need time too."""
_STANDBY_SECONDS = 1.0
_REAP_SECONDS = 2.0
_COUNT_SECONDS = 2.0
_GROUPS_PER_ADMISSION = 64
_EXPLAIN_SECONDS = 30.0
"""Interval of the log lines about a cut that waits for the same reason."""
_LOOP_DEADLINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Waiting:
    """Reason that the next cut waits, its start and its last log line; times are monotonic seconds."""

    waiting_for: str = ""
    since: float = 0.0
    logged_at: float = 0.0


class MeshLeader:
    """Candidate for leadership, which leads while it holds the token."""

    def __init__(
        self,
        store: TrajectoryStore,
        schedule: Schedule,
        open_prompts: OpenPrompts,
        evaluations: PeriodicEvaluations,
        *,
        candidate: str,
        renew_seconds: float,
        metrics: RolloutMetrics,
        health: Health,
        refusals: RefusedPolicies | None = None,
    ) -> None:
        self._store = store
        self._schedule = schedule
        self._open_prompts = open_prompts
        self._evaluations = evaluations
        self._candidate = candidate
        self._renew_seconds = renew_seconds
        self._metrics = metrics
        self._health = health
        metrics.mesh.limits(schedule)
        self._prompts: PromptSource | None = None
        self._token: str | None = None
        self._renew_due = 0.0
        self._reap_due = 0.0
        self._count_due = 0.0
        self._failed = ""
        self._refusals = refusals
        self._refused = ""
        self._waiting = _Waiting()
        self._log = get_logger("leader")

    async def run(self, shutdown: Shutdown) -> None:
        """Open the prompts, compete for leadership and lead until ``shutdown``; resigns at the end.

        The prompts come first: an invalid row then ends the run before any work, and a slow check cannot outlast the
        lease of the leader, which is one session TTL.
        """
        self._health.watch("leader", _LOOP_DEADLINE_SECONDS)
        self._prompts = await open_prompts(
            self._open_prompts, beat=lambda: self._health.beat("leader"), shutdown=shutdown
        )
        before: MeshView | None = None
        while not shutdown.is_set():
            self._health.beat("leader")
            began, wait = time.monotonic(), _STANDBY_SECONDS
            try:
                if await self._leads():
                    view = await self._read_view()
                    wait = _BUSY_SECONDS if await self._act(view) or _changed(before, view) else _IDLE_SECONDS
                    before = view
            except SessionLost as error:
                self._log.warning("lead_lost", message=str(error))
                self._token = None
            except Conflict as error:
                self._log.info("decision_overtaken", message=str(error))
            except StoreUnavailable as error:
                self._log.warning("store_unavailable", message=str(error))
            self._metrics.leader.set(0 if self._token is None else 1)
            await wait_or_shutdown(shutdown, max(_REST_SECONDS, wait - (time.monotonic() - began)))
        self._health.unwatch("leader")
        if self._token is not None:
            await self._store.leadership.resign(self._token)

    async def _leads(self) -> bool:
        now = time.monotonic()
        if self._token is None:
            self._token = await self._store.leadership.acquire(self._candidate)
            self._evaluations.forget()
            self._renew_due = now + self._renew_seconds
            if self._token is not None:
                self._log.info("leads", candidate=self._candidate)
        elif now >= self._renew_due:
            self._renew_due = now + self._renew_seconds
            if not await self._store.leadership.renew(self._token):
                raise SessionLost("another replica leads now")
        return self._token is not None

    async def _read_view(self) -> MeshView:
        """Read the mesh, with single groups only if the decision depends on them."""
        view = await self._store.mesh.view(groups=False)
        return await self._store.mesh.view() if needs_groups(self._schedule, view) else view

    async def _act(self, view: MeshView) -> bool:
        """Apply the decisions on one view; returns True if more than the desired state has changed."""
        assert self._token is not None
        self._metrics.mesh.update(view)
        if time.monotonic() >= self._count_due:
            self._count_due = time.monotonic() + _COUNT_SECONDS
            self._metrics.mesh.counted(await self._store.mesh.counts())
            self._refused = await self._judge_refusals(view)
        if view.recovering:
            # Redis may have been restored to an earlier state, without evaluations requested since then.
            self._evaluations.forget()
        decisions = decide(self._schedule, view)
        failure = decisions.fail or self._failed or self._refused
        if failure != view.failure:
            await self._report(failure)
        desired = bool(failure) or decisions.desired.paused
        self._metrics.mesh.paused(view, desired=desired, failed=bool(failure))
        if failure:
            stop = Desired(pool_size=self._schedule.pool_size, paused=True, reason=failure)
            await self._write(view, stop)
            return False
        # Write the desired state first: groups must never be leased under a version floor older than their admission.
        await self._write(view, decisions.desired, decisions.blocked_by)
        self._explain(decisions.waiting_for)
        await self._evict(decisions)
        await self._cut(view, decisions)
        if decisions.admit_groups:
            await self._admit(decisions.admit_groups)
        await self._evaluations.request_due(view.policy_version)
        if time.monotonic() >= self._reap_due:
            self._reap_due = time.monotonic() + _REAP_SECONDS
            reaped = await self._store.leadership.reap(self._token)
            if reaped:
                self._log.warning("trajectories_of_dead_sessions_returned", count=reaped)
        return bool(decisions.evict or decisions.cut or decisions.admit_groups)

    async def _judge_refusals(self, view: MeshView) -> str:
        """Return the error with which refused policies end the run; empty without one or while a policy is pinned."""
        if self._refusals is None or await self._store.policies.pinned() is not None:
            return ""
        generators, trains = await self._store.generators.live(), view.cut_step > view.trained_step
        error = self._refusals.judge(time.monotonic(), view.policy_version, generators, trains=trains)
        return "" if error is None else f"{type(error).__name__}: {error}"

    async def _write(self, view: MeshView, desired: Desired, blocked_by: str = "") -> None:
        """Write the desired state if the store holds another one."""
        assert self._token is not None
        if (view.desired, view.blocked_by) != (desired, blocked_by):
            await self._store.leadership.set_desired(self._token, desired, blocked_by)

    async def _report(self, failure: str) -> None:
        """Report a failure to the supervisor of the run; an empty one withdraws an earlier report."""
        assert self._token is not None
        if failure:
            self._log.error("run_failed", message=failure)
        await self._store.leadership.report_failure(self._token, failure)

    def _explain(self, waiting_for: str) -> None:
        now, waiting = time.monotonic(), self._waiting
        if waiting_for != waiting.waiting_for:
            self._waiting = _Waiting(waiting_for=waiting_for, since=now, logged_at=now)
        elif waiting_for and now - waiting.logged_at >= _EXPLAIN_SECONDS:
            self._waiting = replace(waiting, logged_at=now)
            self._log.info("cut_waits", waiting_for=waiting_for, seconds=round(now - waiting.since))

    async def _evict(self, decisions: Decisions) -> None:
        assert self._token is not None
        for reason in {eviction.reason for eviction in decisions.evict}:
            ids = [eviction.group_id for eviction in decisions.evict if eviction.reason == reason]
            dropped = await self._store.leadership.evict(self._token, ids, reason)
            self._metrics.mesh.evicted.labels(reason=reason).inc(dropped)
            self._log.info("groups_evicted", reason=reason, count=dropped)

    async def _cut(self, view: MeshView, decisions: Decisions) -> None:
        assert self._token is not None
        if decisions.cut is None:
            return
        step = view.cut_step + 1
        with tracer().span("cut", tracer().train_step(step), train_step=step, groups=len(decisions.cut)):
            await self._store.leadership.cut(self._token, step, decisions.cut)
        steps = {group.group_id: group.min_train_step for group in view.ready}
        staleness = [view.cut_step - oldest for i in decisions.cut if (oldest := steps[i]) is not None]
        self._metrics.mesh.cut(staleness)
        self._log.info("batch_cut", train_step=step, groups=len(decisions.cut), max_staleness=max(staleness, default=0))

    async def _admit(self, count: int) -> None:
        """Open groups at the cursor, a few prompts at a time to keep the event loop responsive."""
        assert self._token is not None and self._prompts is not None
        replayed = await self._store.leadership.admit_replays(self._token, count)
        self._metrics.mesh.admitted.inc(replayed)
        count -= replayed
        cursor = await self._store.leadership.cursor()
        while count > 0:
            groups: list[NewGroup] = []
            before = cursor
            try:
                for _ in range(min(count, _GROUPS_PER_ADMISSION)):
                    groups.append(self._new_group(self._prompts, cursor))
                    cursor = _next(cursor, self._prompts.epoch_size)
            except DataError as error:
                self._failed = f"prompt (epoch {cursor.epoch}, index {cursor.index}): {error}"
                return
            opened = await self._store.leadership.admit(self._token, groups, before, cursor)
            self._metrics.mesh.admitted.inc(opened)
            count -= len(groups)
            await asyncio.sleep(0)

    def _new_group(self, prompts: PromptSource, cursor: Cursor) -> NewGroup:
        if cursor.index >= prompts.epoch_size:
            raise DataError(
                f"data.source has {prompts.epoch_size} training prompts, but this run has admitted more of the epoch: "
                "the data has shrunk since; restore it and restart the run, or start another run"
            )
        return NewGroup(
            group_id=f"e{cursor.epoch}-{cursor.index}",
            prompt=prompts.prompt(cursor.epoch, cursor.index),
            needed=self._schedule.group_size,
            epoch=cursor.epoch,
            index=cursor.index,
        )


def _next(cursor: Cursor, epoch_size: int) -> Cursor:
    if cursor.index + 1 < epoch_size:
        return Cursor(epoch=cursor.epoch, index=cursor.index + 1)
    return Cursor(epoch=cursor.epoch + 1, index=0)


def _changed(before: MeshView | None, view: MeshView) -> bool:
    """Tell whether the mesh has changed since the last view."""
    if before is None:
        return True
    watched = (
        "trained_step",
        "cut_step",
        "policy_version",
        "ready_groups",
        "open_groups",
        "finished",
        "leased",
        "partial",
    )
    return any(getattr(before, name) != getattr(view, name) for name in watched)
