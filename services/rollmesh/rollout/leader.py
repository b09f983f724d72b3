"""Leader of the mesh: the replica that reads the state of the mesh, decides, and writes the decisions to the store.

Every write carries the leader's token, so a stalled replica that has lost the lead changes nothing. Decisions depend
on the current view only: a new leader decides again on all that the previous leader left incomplete.
"""

import asyncio
import time
from collections.abc import Callable

from rollmesh.curriculum.planners import RoundRules
from rollmesh.errors import Conflict, DataError, SessionLost, StoreUnavailable
from rollmesh.mesh import Cursor, Desired, MeshView, WasteReason
from rollmesh.rollout.leader_parts import (
    PeriodicEvaluations,
    PoolEvidence,
    RefusedPolicies,
    RoundDecisions,
    StartRanking,
    commonest_reason,
)
from rollmesh.rollout.prompt_supply import OpenPrompts, PromptDraws, open_prompts
from rollmesh.rollout.rollout_metrics import RolloutMetrics
from rollmesh.runtime.health import Health
from rollmesh.runtime.lifecycle import Shutdown, wait_or_shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.tracing import tracer
from rollmesh.scheduling import CutOrder, Schedule, decide, needs_groups
from rollmesh.scheduling.decide import Admit, BeginAgain, CutBatch, Evict, LeaderStep, Recall, SetDesired, leader_steps
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
        tokenizer: str = "",
        refusals: RefusedPolicies | None = None,
        rounds: RoundRules | None = None,
        open_draws: Callable[[PromptSource], PromptDraws] | None = None,
        scoring_problem: Callable[[], str] = lambda: "",
    ) -> None:
        """Create a candidate.

        ``tokenizer`` is ``Tokenizer.content``; ``open_draws`` wraps the opened prompts in a run with a sampler.
        ``scoring_problem`` returns why the worker of this process got no reward for its newest answer without one.
        """
        self._store = store
        self._schedule = schedule
        self._open_prompts = open_prompts
        self._evaluations = evaluations
        self._candidate = candidate
        self._renew_seconds = renew_seconds
        self._metrics = metrics
        self._health = health
        metrics.mesh.limits(schedule)
        self._ranking = StartRanking(store, schedule, metrics.mesh)
        self._pool_evidence = PoolEvidence(store, schedule)
        self._rounds = RoundDecisions(store, rounds)
        self._prompts: PromptSource | None = None
        self._open_draws = open_draws
        self._draws: PromptDraws | None = None
        self._token: str | None = None
        self._renew_due = 0.0
        self._reap_due = 0.0
        self._count_due = 0.0
        self._failed = ""
        self._tokenizer = tokenizer
        self._files_checked = False
        self._refusals = refusals
        self._refused = ""
        self._hopeless = self._reason = ""
        self._scoring_problem = scoring_problem
        self._waiting_for = ""
        self._waits_since = self._wait_logged_at = 0.0
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
        if self._prompts is not None and self._open_draws is not None:
            self._draws = await asyncio.to_thread(self._open_draws, self._prompts)
        before: MeshView | None = None
        while not shutdown.is_set():
            self._health.beat("leader")
            began, wait = time.monotonic(), _STANDBY_SECONDS
            try:
                if (token := await self._lead()) is not None:
                    view = await self._read_view()
                    changed = await self._act(token, view) or before is None or _counts(before) != _counts(view)
                    wait, before = _BUSY_SECONDS if changed else _IDLE_SECONDS, view
            except SessionLost as error:
                self._log.warning("lead_lost", message=str(error))
                self._token = None
                # Alerts and adapters take the largest pool of all replicas.
                self._metrics.mesh.limits(self._schedule)
            except Conflict as error:
                self._log.info("decision_overtaken", message=str(error))
            except StoreUnavailable as error:
                self._log.warning("store_unavailable", message=str(error))
            self._metrics.leader.set(0 if self._token is None else 1)
            await wait_or_shutdown(shutdown, max(_REST_SECONDS, wait - (time.monotonic() - began)))
        self._health.unwatch("leader")
        if self._token is not None:
            await self._store.leadership.resign(self._token)

    async def _lead(self) -> str | None:
        """Acquire or renew the leadership; returns the token, or None while another replica leads."""
        now = time.monotonic()
        if self._token is None:
            self._token = await self._store.leadership.acquire(self._candidate)
            self._evaluations.forget()
            self._pool_evidence.forget()
            self._forget_draws()
            self._files_checked = False
            self._count_due = 0.0
            self._renew_due = now + self._renew_seconds
            if self._token is not None:
                self._log.info("leads", candidate=self._candidate)
        elif now >= self._renew_due:
            self._renew_due = now + self._renew_seconds
            if not await self._store.leadership.renew(self._token):
                raise SessionLost("another replica leads now")
        return self._token

    async def _read_view(self) -> MeshView:
        """Read the mesh, with single groups only if the decision depends on them."""
        view = await self._store.mesh.view(groups=False)
        if needs_groups(self._schedule, view):
            view = await self._store.mesh.view(shortest=self._schedule.cut_order is CutOrder.SHORTEST)
        return self._pool_evidence.added_to(view)

    async def _act(self, token: str, view: MeshView) -> bool:
        """Apply the decisions on one view; returns True if more than the desired state has changed."""
        self._metrics.mesh.update(view)
        if time.monotonic() >= self._count_due:
            self._count_due = time.monotonic() + _COUNT_SECONDS
            counts = await self._store.mesh.counts()
            self._metrics.mesh.counted(counts, view.policy_train_step)
            await self._pool_evidence.measure(counts)
            await self._ranking.measure()
            self._refused = await self._judge_refusals(view)
        if view.recovering:
            # Redis may have been restored to an earlier state, without evaluations requested since then.
            self._evaluations.forget()
            self._forget_draws()
            self._files_checked = False
        await self._check_files()
        decisions = decide(self._schedule, view)
        self._metrics.mesh.pool(self._schedule, view, decisions.desired)
        failure = await self._with_reason(decisions.fail, view) or self._failed or self._refused
        if failure != view.failure:  # an empty one withdraws an earlier report
            if failure:
                self._log.error("run_failed", message=failure)
            await self._store.leadership.report_failure(token, failure)
        desired = bool(failure) or decisions.desired.paused
        self._metrics.mesh.paused(view, desired=desired, failed=bool(failure))
        if failure:
            # The bound by the caches stays: a failure may be withdrawn.
            wanted = decisions.desired
            stop = Desired(
                pool_size=wanted.pool_size,
                most_waiting=wanted.most_waiting,
                cache_pool=wanted.cache_pool,
                paused=True,
                reason=failure,
            )
            await self._write(token, view, stop)
            return False
        self._explain(decisions.desired.waiting_for)
        steps = list(leader_steps(decisions))
        for step in steps:
            await self._apply(token, view, step)
        await self._evaluations.request_due(view.policy_version)
        if time.monotonic() >= self._reap_due:
            self._reap_due = time.monotonic() + _REAP_SECONDS
            reaped = await self._store.leadership.reap(token)
            if reaped:
                self._log.warning("trajectories_of_dead_sessions_returned", count=reaped)
        try:
            has_decided = await self._rounds.decide(token, view)
        except DataError as error:  # a planner or a group shaper that fails; the error names it
            self._failed, has_decided = str(error), True
        return has_decided or len(steps) > 1

    async def _apply(self, token: str, view: MeshView, step: LeaderStep) -> None:
        """Apply a step to the store, and count and log it."""
        leadership, restarted, counters = self._store.leadership, self._store.restarted, self._metrics.mesh
        match step:
            case SetDesired(desired, blocked_by):
                await self._write(token, view, desired, blocked_by)
            case Evict(group_ids, reason):
                count = await leadership.evict(token, group_ids, reason)
                counters.evicted.labels(reason=reason).inc(count)
                self._log.info("groups_evicted", reason=reason, count=count)
            case BeginAgain(group_ids, reason):
                begin = restarted.restart if reason is WasteReason.RESTARTED else restarted.set_aside
                count = await begin(token, group_ids)
                counters.begun_again.labels(kind=reason).inc(count)
                self._log.info(f"groups_{reason}", count=count)
            case CutBatch(group_ids):
                await self._cut(token, view, group_ids)
            case Recall(count):
                recalled = await restarted.recall(token, view.cut_step + 1, count)
                counters.begun_again.labels(kind="recalled").inc(recalled)
                self._log.info("groups_recalled", train_step=view.cut_step + 1, count=recalled)
            case Admit(count):
                await self._admit(token, count, view.trained_step)

    async def _check_files(self) -> None:
        if self._files_checked:
            return
        assert self._prompts is not None
        try:
            await self._store.leadership.check_content("model.path", self._tokenizer)
            await self._store.leadership.check_content("data.source", self._prompts.content, self._prompts.epoch_size)
        except DataError as error:
            self._failed = str(error)
        self._files_checked = True

    async def _judge_refusals(self, view: MeshView) -> str:
        """Return the error with which refused policies end the run; empty without one or while a policy is pinned."""
        if self._refusals is None or await self._store.policies.pinned() is not None:
            return ""
        generators, trains = await self._store.generators.live(), view.cut_step > view.trained_step
        error = self._refusals.judge(time.monotonic(), view.policy_version, generators, trains=trains)
        return "" if error is None else f"{type(error).__name__}: {error}"

    async def _with_reason(self, failure: str, view: MeshView) -> str:
        """Return a failure of the schedule; one for lack of scores with those of dead letters and verifier."""
        if failure != self._hopeless:
            self._reason, self._hopeless = "", failure
            if failure and view.unscored_in_a_row >= self._schedule.max_filtered_in_a_row:
                problem = self._scoring_problem()
                newest = problem and f"; the newest answer without a reward: {problem}"
                self._reason = await commonest_reason(self._store.dead_letters) + newest
        return f"{failure}{self._reason}"

    async def _write(self, token: str, view: MeshView, desired: Desired, blocked_by: str = "") -> None:
        """Write the desired state if the store holds another one."""
        if (view.desired, view.desired.waiting_for, view.blocked_by) != (desired, desired.waiting_for, blocked_by):
            await self._store.leadership.set_desired(token, desired, blocked_by)

    def _explain(self, waiting_for: str) -> None:
        now = time.monotonic()
        if waiting_for != self._waiting_for:
            self._waiting_for, self._waits_since, self._wait_logged_at = waiting_for, now, now
        elif waiting_for and now - self._wait_logged_at >= _EXPLAIN_SECONDS:
            self._wait_logged_at = now
            self._log.info("cut_waits", waiting_for=waiting_for, seconds=round(now - self._waits_since))

    async def _cut(self, token: str, view: MeshView, group_ids: tuple[str, ...]) -> None:
        step = view.cut_step + 1
        with tracer().span("cut", tracer().train_step(step), train_step=step, groups=len(group_ids)):
            await self._store.leadership.cut(token, step, group_ids)
        steps = {group.group_id: group.min_train_step for group in view.ready}
        staleness = [view.cut_step - oldest for name in group_ids if (oldest := steps[name]) is not None]
        self._metrics.mesh.cut(staleness)
        self._log.info("batch_cut", train_step=step, groups=len(group_ids), max_staleness=max(staleness, default=0))

    def _forget_draws(self) -> None:
        if self._draws is not None:
            self._draws.forget()

    async def _admit(self, token: str, count: int, train_step: int) -> None:
        """Open groups at the cursor, a few prompts at a time to keep the event loop responsive."""
        assert self._prompts is not None
        replayed = await self._store.leadership.admit_replays(token, count)
        self._metrics.mesh.admitted.inc(replayed)
        count -= replayed
        if self._draws is not None:
            await self._draws.refresh(train_step)
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
            try:
                ranked = await self._ranking.ranked(await self._rounds.planned(groups))
                opened = await self._store.leadership.admit(token, ranked, before, cursor)
            except DataError as error:  # a prompt that cannot be encoded or a planner that fails; the error names it
                self._failed = str(error)
                return
            self._metrics.mesh.admitted.inc(opened)
            count -= len(groups)
            await asyncio.sleep(0)

    def _new_group(self, prompts: PromptSource, cursor: Cursor) -> NewGroup:
        if self._draws is None:
            prompt, record_name = prompts.prompt(cursor.epoch, cursor.index), ""
        else:
            prompt, record_name = self._draws.draw(cursor)
        return NewGroup(
            group_id=f"e{cursor.epoch}-{cursor.index}",
            prompt=prompt,
            record_name=record_name,
            needed=self._schedule.group_size,
            spare_members=self._schedule.spare_members,
            epoch=cursor.epoch,
            index=cursor.index,
        )


def _next(cursor: Cursor, epoch_size: int) -> Cursor:
    if cursor.index + 1 < epoch_size:
        return Cursor(epoch=cursor.epoch, index=cursor.index + 1)
    return Cursor(epoch=cursor.epoch + 1, index=0)


def _counts(view: MeshView) -> tuple[int, ...]:
    """Return the numbers whose change makes the next decision due early."""
    steps = (view.trained_step, view.cut_step, view.policy_version)
    groups = (view.ready_groups, view.open_groups, view.undecided_groups, view.aside_groups)
    return (*steps, *groups, view.finished, view.leased, view.waiting, view.partial, view.resting)
