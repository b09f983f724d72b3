"""Batched writes to the queue: partial saves, last tokens, scores, releases, failures, restarts."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

from rollmesh.errors import Conflict
from rollmesh.runtime.tasks import BackgroundTasks
from rollmesh.runtime.tracing import tracer
from rollmesh.store.queue_types import Append, AppendResult, Finish, FirstToken, ReleaseReason, Score
from rollmesh.store.trajectories import TrajectoryQueue
from rollmesh.types import FinishReason, WriteStatus
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo
from rollmesh.worker.trajectory_scoring import ScoredResult
from rollmesh.worker.worker_session import WorkerSession

T = TypeVar("T")
R = TypeVar("R")

_ITEMS_PER_WRITE = 256
_RESENDS = 4
"""Attempts of a write, for example from different offsets, before the worker drops the trajectory."""


class CallBatcher(Generic[T, R]):
    """Batcher that sends items in calls of at most ``limit`` items, one call at a time."""

    def __init__(self, call: Callable[[list[T]], Awaitable[Sequence[R]]], *, limit: int) -> None:
        self._call = call
        self._limit = limit
        self._items: list[tuple[T, asyncio.Future[R]]] = []
        self._running = False
        self._tasks = BackgroundTasks()

    async def submit(self, item: T) -> R:
        """Return the result of one item; an error of the batched call is raised for every item of its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._items.append((item, future))
        if not self._running:
            self._running = True
            self._tasks.start(self._drain())  # starts in the next tick: every item of this one joins the first batch
        return await future

    async def _drain(self) -> None:
        try:
            while self._items:
                batch, self._items = self._items[: self._limit], self._items[self._limit :]
                wanted = [(item, future) for item, future in batch if not future.cancelled()]
                if wanted:
                    await self._run([item for item, _ in wanted], [future for _, future in wanted])
        finally:
            # In the same step as the last check of the items: the next submit must start a runner again.
            self._running = False

    async def _run(self, items: list[T], futures: list[asyncio.Future[R]]) -> None:
        try:
            results = await self._call(items)
            if len(results) != len(items):
                raise RuntimeError(f"a batched call answered {len(items)} items with {len(results)} results")
        except BaseException as error:
            for future in futures:
                if not future.done():
                    future.set_exception(error if isinstance(error, Exception) else asyncio.CancelledError())
            if not isinstance(error, Exception):
                raise
            return
        for future, result in zip(futures, results, strict=True):
            if not future.done():
                future.set_result(result)


class Saver:
    """Writer of the worker's trajectories; every method returns once the queue has answered."""

    def __init__(self, queue: TrajectoryQueue, session: WorkerSession) -> None:
        self._queue = queue
        self._session = session
        split = self._split_on_conflict
        self._appends = CallBatcher(partial(split, queue.append), limit=_ITEMS_PER_WRITE)
        self._first_tokens = CallBatcher(partial(split, queue.report_first_tokens), limit=_ITEMS_PER_WRITE)
        self._finishes = CallBatcher(partial(split, queue.finish), limit=_ITEMS_PER_WRITE)
        self._scores = CallBatcher(self._score, limit=_ITEMS_PER_WRITE)
        self._releases = CallBatcher(self._release, limit=_ITEMS_PER_WRITE)
        self._failures = CallBatcher(self._fail, limit=_ITEMS_PER_WRITE)
        self._restarts = CallBatcher(self._restart, limit=_ITEMS_PER_WRITE)

    async def save(self, active: ActiveTrajectory, *mark: Any) -> None:
        """Append the unsaved tokens, if any; raises LetGo if the lease is lost.

        ``mark``: mark of an agent's session after these tokens, its id and its name, saved in the same step.
        """
        if active.saved_token_count == active.token_count:
            return
        if mark:
            active.snapshot = mark[0]
        with tracer().span(
            "queue.append", active.traceparent, kind="client", token_offset=active.saved_token_count
        ) as span:
            append = partial(Append, generator=active.generator, mark=mark or None)
            await self._write(active, self._appends, append)
            span.set(saved_tokens=active.saved_token_count)

    async def report_first_token(self, active: ActiveTrajectory) -> None:
        """Report the policy version of an unsaved first token, once; raises LetGo if the lease is lost."""
        # docs/architecture.md: The staleness bound
        version = active.unreported_version
        if version is None:
            return
        item = FirstToken(trajectory_id=active.trajectory_id, policy_version=version)
        for _ in range(2):
            active.check_lost()
            if (await self._first_tokens.submit(item)).status.ok:
                active.first_token_reported = True
                return
            await self._session.confirm()
        active.lose("this worker no longer holds the lease of the trajectory")
        raise LetGo(active.trajectory_id)

    async def finish(self, active: ActiveTrajectory, reason: FinishReason) -> None:
        """Save the remaining tokens and the finish reason; raises LetGo if the lease is lost."""
        with tracer().span("queue.finish", active.traceparent, kind="client", finish_reason=reason.value):
            await self._write(active, self._finishes, partial(Finish, finish_reason=reason))
        active.finish_reason = reason

    async def score(self, active: ActiveTrajectory, result: ScoredResult) -> None:
        """Record the score of a finished trajectory; raises LetGo if the queue rejects it."""
        score = Score(
            trajectory_id=active.trajectory_id,
            outcome=result.outcome,
            shaped_reward=result.shaped_reward,
            assigned=result.assigned,
            teacher=result.teacher,
        )
        with tracer().span("queue.score", active.traceparent, kind="client", outcome=result.outcome.kind.value):
            await self._record(active, score)

    async def _record(self, active: ActiveTrajectory, score: Score) -> None:
        for _ in range(_RESENDS):
            active.check_lost()
            status = (await self._scores.submit(score)).status
            if status.ok:
                return
            await self._session.confirm()
            if status is WriteStatus.REFUSED and active.finish_reason is not None:
                # Redis was restored to a state before the end of the trajectory: finish it again.
                await self.finish(active, active.finish_reason)
        raise LetGo("the queue rejects the score of the trajectory")

    async def release(self, trajectory_id: str, reason: ReleaseReason) -> None:
        """Release the lease."""
        await self._releases.submit((trajectory_id, reason))

    async def fail(self, trajectory_id: str, reason: str) -> None:
        """Turn the trajectory into a dead letter."""
        await self._failures.submit((trajectory_id, reason))

    async def keep_snapshot(self, active: ActiveTrajectory, snapshot: bytes, *agent: str) -> None:
        """Store the state of the trajectory's environment; a lease lost meanwhile is only detected by the next save.

        ``agent``: id and name of the agent's session. Raises LetGo if the lease is known to be lost, and Conflict if
        another session in progress has the name.
        """
        active.check_lost()
        active.snapshot = snapshot
        trajectory_id, incarnation = active.trajectory_id, active.incarnation
        await self._session.call(
            lambda session: self._queue.keep_snapshot(session, trajectory_id, snapshot, *agent, incarnation=incarnation)
        )

    async def restart(self, active: ActiveTrajectory) -> None:
        """Drop the saved tokens: the trajectory restarts under the same lease. Raises LetGo if the lease is lost."""
        for _ in range(_RESENDS):
            active.check_lost()
            incarnation = await self._restarts.submit(active.trajectory_id)
            if incarnation is not None:
                active.restart(incarnation)
                return
            await self._session.confirm()
        raise LetGo("this worker no longer holds the lease of the trajectory")

    async def _write(
        self, active: ActiveTrajectory, batcher: CallBatcher[T, AppendResult], item: Callable[..., T]
    ) -> None:
        """Write the unsaved tokens as one ``item``, from the offset that the queue has."""
        confirmed = False
        for _ in range(_RESENDS):
            active.check_lost()
            offset, end = active.saved_token_count, active.token_count
            result = await batcher.submit(
                item(
                    trajectory_id=active.trajectory_id,
                    token_offset=offset,
                    segments=active.unsaved(),
                    incarnation=active.incarnation,
                    digest=active.digest_at(offset),
                )
            )
            if result.status.ok:
                active.saved_token_count = end
                return
            if result.status is WriteStatus.LOST:
                if confirmed:
                    break
                await self._session.confirm()
                confirmed = True
                continue
            if result.saved_token_count == offset or result.saved_token_count > end:
                break  # the queue stores other tokens at this offset: these must not be appended to them
            # Redis was restored to a state before the last save, or the task that waited for that save was cancelled.
            active.saved_token_count = result.saved_token_count
        active.lose("this worker no longer holds the lease of the trajectory")
        raise LetGo(active.trajectory_id)

    async def _score(self, items: list[Score]) -> Sequence[AppendResult]:
        return await self._session.call(lambda session: self._queue.score(session, items))

    async def _split_on_conflict(
        self, write: Callable[[str, list[T]], Awaitable[list[AppendResult]]], items: list[T]
    ) -> Sequence[AppendResult]:
        """Write the items, halved on each Conflict, so that an unannounced policy version fails only its own item."""
        try:
            return await self._session.call(lambda session: write(session, items))
        except Conflict:
            if len(items) == 1:
                item_id = items[0].trajectory_id  # type: ignore[attr-defined]
                return [AppendResult(trajectory_id=item_id, status=WriteStatus.LOST, saved_token_count=0)]
            half = len(items) // 2
            first = await self._split_on_conflict(write, items[:half])
            return [*first, *await self._split_on_conflict(write, items[half:])]

    async def _release(self, items: list[tuple[str, ReleaseReason]]) -> Sequence[None]:
        for reason in ReleaseReason:
            if ids := [trajectory_id for trajectory_id, wanted in items if wanted is reason]:
                await self._session.call(partial(self._queue.release, trajectory_ids=ids, reason=reason))
        return [None] * len(items)

    async def _fail(self, items: list[tuple[str, str]]) -> Sequence[None]:
        await self._session.call(lambda session: self._queue.fail(session, items))
        return [None] * len(items)

    async def _restart(self, items: list[str]) -> Sequence[int | None]:
        return await self._session.call(lambda session: self._queue.restart(session, items))
