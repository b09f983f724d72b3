"""Writes of many trajectories travel together: partial saves, last tokens, scores, releases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rollmesh.errors import Conflict
from rollmesh.runtime.tracing import tracer
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import Append, AppendResult, Finish, FirstToken, ReleaseReason, Score, WriteStatus
from rollmesh.types import FinishReason, RewardOutcome
from rollmesh.worker.active_trajectory import ActiveTrajectory, LetGo
from rollmesh.worker.call_batcher import CallBatcher
from rollmesh.worker.worker_session import WorkerSession

T = TypeVar("T")

_ITEMS_PER_WRITE = 256
_RESENDS = 4
"""Times a write may be told to start from another offset before the trajectory is let go."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Release:
    trajectory_id: str
    reason: ReleaseReason


class Saver:
    """Saves, finishes, scores and releases held trajectories; every method returns once the queue has answered."""

    def __init__(self, store: TrajectoryStore, session: WorkerSession) -> None:
        self._store = store
        self._session = session
        self._appends = CallBatcher(self._append, limit=_ITEMS_PER_WRITE)
        self._first_tokens = CallBatcher(self._report_first_tokens, limit=_ITEMS_PER_WRITE)
        self._finishes = CallBatcher(self._finish, limit=_ITEMS_PER_WRITE)
        self._scores = CallBatcher(self._score, limit=_ITEMS_PER_WRITE)
        self._releases = CallBatcher(self._release, limit=_ITEMS_PER_WRITE)
        self._failures = CallBatcher(self._fail, limit=_ITEMS_PER_WRITE)
        self._restarts = CallBatcher(self._restart, limit=_ITEMS_PER_WRITE)

    async def save(self, held: ActiveTrajectory) -> None:
        """Append what is not saved yet. Raises LetGo when the queue does not want it."""
        if held.saved_token_count == held.token_count:
            return

        def item(offset: int) -> Append:
            return Append(
                trajectory_id=held.trajectory_id,
                token_offset=offset,
                segments=held.unsaved(),
                generator=held.generator,
                incarnation=held.incarnation,
                digest=held.digest_at(offset),
            )

        with tracer().span(
            "queue.append", held.traceparent, kind="client", token_offset=held.saved_token_count
        ) as span:
            await self._write(held, self._appends, item)
            span.set(saved_tokens=held.saved_token_count)

    async def report_first_token(self, held: ActiveTrajectory) -> None:
        """Tell the queue, once, the policy version of a first token that is saved later. Raises LetGo as ``save``."""
        version = held.first_version
        if version is None or held.saved_token_count or held.first_token_reported:
            return
        item = FirstToken(trajectory_id=held.trajectory_id, policy_version=version)
        for _ in range(2):
            held.check_lost()
            if (await self._first_tokens.submit(item)).status.ok:
                held.first_token_reported = True
                return
            await self._session.confirm()
        held.lose("the queue does not hold the trajectory for this worker any more")
        raise LetGo(held.trajectory_id)

    async def finish(self, held: ActiveTrajectory, reason: FinishReason) -> None:
        """Save the rest and the finish reason. Raises LetGo when the queue does not want it."""

        def item(offset: int) -> Finish:
            return Finish(
                trajectory_id=held.trajectory_id,
                token_offset=offset,
                segments=held.unsaved(),
                finish_reason=reason,
                incarnation=held.incarnation,
                digest=held.digest_at(offset),
            )

        with tracer().span("queue.finish", held.traceparent, kind="client", finish_reason=reason.value):
            await self._write(held, self._finishes, item)
        held.finish_reason = reason

    async def score(
        self, held: ActiveTrajectory, outcome: RewardOutcome, shaped_reward: float, *, assigned: bool
    ) -> None:
        """Record the outcome of a finished trajectory. Raises LetGo when the queue does not want it."""
        score = Score(trajectory_id=held.trajectory_id, outcome=outcome, shaped_reward=shaped_reward, assigned=assigned)
        with tracer().span("queue.score", held.traceparent, kind="client", outcome=outcome.kind.value):
            await self._record(held, score)

    async def _record(self, held: ActiveTrajectory, score: Score) -> None:
        for _ in range(_RESENDS):
            held.check_lost()
            status = (await self._scores.submit(score)).status
            if status.ok:
                return
            await self._session.confirm()
            if status is WriteStatus.REFUSED and held.finish_reason is not None:
                # Redis came back from before the end of the trajectory: end it again.
                await self.finish(held, held.finish_reason)
        raise LetGo("its score is not wanted")

    async def release(self, trajectory_id: str, reason: ReleaseReason) -> None:
        """Give the lease back."""
        await self._releases.submit(_Release(trajectory_id=trajectory_id, reason=reason))

    async def fail(self, trajectory_id: str, reason: str) -> None:
        """Make a dead letter of the trajectory."""
        await self._failures.submit((trajectory_id, reason))

    async def keep_snapshot(self, held: ActiveTrajectory, snapshot: bytes) -> None:
        """Keep the state of the trajectory's environment; whether it is still ours, the next save finds out."""
        held.snapshot = snapshot
        await self._session.call(lambda session: self._store.keep_snapshot(session, held.trajectory_id, snapshot))

    async def restart(self, held: ActiveTrajectory) -> None:
        """Drop the saved tokens: the trajectory begins again under the same lease.

        Raises LetGo when the queue does not hold it for this worker.
        """
        for _ in range(_RESENDS):
            held.check_lost()
            incarnation = await self._restarts.submit(held.trajectory_id)
            if incarnation is not None:
                held.restart()
                held.incarnation = incarnation
                return
            await self._session.confirm()
        raise LetGo("the queue does not hold the trajectory for this worker any more")

    async def _write(
        self, held: ActiveTrajectory, lane: CallBatcher[T, AppendResult], item: Callable[[int], T]
    ) -> None:
        confirmed = False
        for _ in range(_RESENDS):
            held.check_lost()
            offset, end = held.saved_token_count, held.token_count
            result = await lane.submit(item(offset))
            if result.status.ok:
                held.saved_token_count = end
                return
            if result.status is WriteStatus.LOST:
                if confirmed:
                    break
                await self._session.confirm()
                confirmed = True
                continue
            if result.saved_token_count >= offset:
                break  # other tokens are there: ours were written after others, and must not be joined to these
            held.saved_token_count = result.saved_token_count  # Redis came back from before the last save
        held.lose("the queue does not hold the trajectory for this worker any more")
        raise LetGo(held.trajectory_id)

    async def _append(self, items: list[Append]) -> Sequence[AppendResult]:
        return await self._split_on_conflict(items, self._store.append)

    async def _report_first_tokens(self, items: list[FirstToken]) -> Sequence[AppendResult]:
        return await self._split_on_conflict(items, self._store.report_first_tokens)

    async def _finish(self, items: list[Finish]) -> Sequence[AppendResult]:
        return await self._split_on_conflict(items, self._store.finish)

    async def _score(self, items: list[Score]) -> Sequence[AppendResult]:
        return await self._session.call(lambda session: self._store.score(session, items))

    async def _split_on_conflict(
        self, items: list[T], write: Callable[[str, list[T]], Awaitable[list[AppendResult]]]
    ) -> Sequence[AppendResult]:
        """A policy version that nobody announced makes the whole call fail: only its own trajectory may suffer."""
        try:
            return await self._session.call(lambda session: write(session, items))
        except Conflict:
            if len(items) == 1:
                item_id = items[0].trajectory_id  # type: ignore[attr-defined]
                return [AppendResult(trajectory_id=item_id, status=WriteStatus.LOST, saved_token_count=0)]
            half = len(items) // 2
            first = await self._split_on_conflict(items[:half], write)
            return [*first, *await self._split_on_conflict(items[half:], write)]

    async def _release(self, items: list[_Release]) -> Sequence[None]:
        for reason in ReleaseReason:
            ids = [item.trajectory_id for item in items if item.reason is reason]

            async def release(session: str, ids: list[str] = ids, reason: ReleaseReason = reason) -> int:
                return await self._store.release(session, ids, reason)

            if ids:
                await self._session.call(release)
        return [None] * len(items)

    async def _fail(self, items: list[tuple[str, str]]) -> Sequence[None]:
        await self._session.call(lambda session: self._store.fail(session, items))
        return [None] * len(items)

    async def _restart(self, items: list[str]) -> Sequence[int | None]:
        return await self._session.call(lambda session: self._store.restart(session, items))
