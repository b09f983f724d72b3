"""Reads of a live run: the newest poll of the mesh, the queue and the batch files."""

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.errors import Conflict, DataError
from rollmesh.gateway.archive import Pieces, in_order, preview_of, shown_ends
from rollmesh.gateway.curves import names_of
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.mesh_snapshot import finished_evaluations, generator_views
from rollmesh.gateway.models.items import (
    DeadLetterList,
    DeadLetterView,
    GeneratorList,
    PolicyList,
    PolicyView,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
    TrajectorySummary,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.read_routes import RunReads
from rollmesh.gateway.trajectory_views import trajectory_detail
from rollmesh.runtime.request_guard import NotFound
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import SORTED, InspectedTrajectory, TrajectoryMark
from rollmesh.types import Trajectory, TrajectoryState

MOST_SORTED = 20_000
"""Trajectories that are sorted, the oldest groups first."""
_READ_AT_ONCE = 2048
_KEPT_SECONDS = 2.0
"""Time that a list of the queue serves further sorted pages."""
_KEPT_LISTS = 4


class LiveReads(RunReads):
    """Reads of a run in progress."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller) -> None:
        super().__init__(config, Path(config.folder))
        self._store = store
        self._poller = poller
        self._queue = QueueLists(store, self._pieces)
        self.hub = poller.hub

    async def overview(self) -> Overview:
        return self._poller.overview()

    async def timeline(self) -> Timeline:
        return self._poller.timeline()

    async def series(self, names: str = "", points: int = 300) -> SeriesAnswer:
        return self._poller.curves.answer(names_of(names), points)

    async def trajectories(
        self,
        state: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        order: QueueOrder = "queue",
        descending: bool = False,
        preview: bool = False,
    ) -> TrajectoryPage:
        return await self._queue.page(state, cursor, limit, order, descending, preview)

    async def trajectory(self, trajectory_id: str, first_token: int = 0, token_limit: int = 4096) -> TrajectoryDetail:
        part = first_token, token_limit
        inspected = await self._store.inspection.inspect(trajectory_id)
        # The tokens of a dead one are in its letter.
        if inspected is not None and inspected.trajectory is not None and inspected.mark.state != TrajectoryState.DEAD:
            return await self._in_queue(inspected, inspected.trajectory, *part)
        try:
            letter = await self._store.dead_letters.get(trajectory_id)
        except Conflict:
            letter = None
        if letter is not None and letter.trajectory is not None:
            detail = await self._detail(letter.trajectory, *part)
            return detail.model_copy(update={"state": TrajectoryState.DEAD.value, "found_in": "dead_letter"})
        left_at = await self._store.inspection.gone_at(trajectory_id.rpartition(".")[0])
        trained = (await self._store.training.state()).trained_step
        if (found := await self._in_batches(trajectory_id, left_at, trained, *part)) is not None:
            return found
        if left_at is None:
            raise NotFound(
                f"no trajectory {trajectory_id} in the queue, in a batch file or among the dead letters",
                field="trajectory_id",
                hint="ids are <group>.<member>, as listed by /api/v1/trajectories",
            )
        raise NotFound(
            f"the group of {trajectory_id} left the queue about train step {left_at}, and no batch file here has it",
            field="trajectory_id",
            hint="it was dropped (overview: drops), or the checkpoint folder is not on this machine",
        )

    async def _in_queue(
        self, inspected: InspectedTrajectory, trajectory: Trajectory, first_token: int, token_limit: int
    ) -> TrajectoryDetail:
        mark = inspected.mark
        workers = await self._store.inspection.workers() if mark.session else {}
        detail = await self._detail(trajectory, first_token, token_limit)
        members = [f"{trajectory.group_id}.{member}" for member in range(inspected.member_count)]
        marks = await self._store.inspection.marks(members)
        return detail.model_copy(
            update={
                "members": members,
                "member_rewards": tuple(None if each is None else each.reward for each in marks),
                "state": mark.state,
                "train_step": mark.train_step,
                "worker": workers.get(mark.session, ""),
                "history": list(inspected.history.sentences()),
            }
        )

    async def _detail(self, trajectory: Trajectory, first_token: int, token_limit: int) -> TrajectoryDetail:
        # Decode in a thread: the text of thousands of tokens takes a while.
        return await asyncio.to_thread(trajectory_detail, trajectory, first_token, token_limit, self._pieces)

    async def policies(self, limit: int = 100) -> PolicyList:
        policies = await self._store.policies.announced()
        generators = await self._store.generators.live()
        pinned = await self._store.policies.pinned()
        points = {point.policy_version: point for point in finished_evaluations(await self._store.evaluations.all())}
        newest = policies[-1].policy_version if policies else -1
        views = [
            PolicyView(
                policy_version=policy.policy_version,
                train_step=policy.train_step,
                newest=policy.policy_version == newest,
                pinned=policy.policy_version == pinned,
                generators=sum(g.serving and g.policy_version == policy.policy_version for g in generators),
                evaluation=points.get(policy.policy_version),
            )
            for policy in reversed(policies[-limit:])
        ]
        return PolicyList(policies=views, total=len(policies))

    async def generators(self) -> GeneratorList:
        latest = await self._store.policies.latest()
        newest = -1 if latest is None else latest.policy_version
        return GeneratorList(generators=generator_views(await self._store.generators.live(), newest))

    async def dead_letters(self, limit: int = 100) -> DeadLetterList:
        views = [
            DeadLetterView(
                trajectory_id=letter.trajectory_id,
                group_id=letter.group_id,
                reason=letter.reason,
                time=letter.time_seconds,
                attempts=letter.attempts,
                tokens=letter.token_count,
                replayed_as=letter.replayed_as,
            )
            for letter in await self._store.dead_letters.newest(limit)
        ]
        return DeadLetterList(dead_letters=views, total=(await self._store.mesh.counts()).dead_letters)


class QueueLists:
    """Lists of one queue."""

    def __init__(self, store: TrajectoryStore, pieces: Pieces | None) -> None:
        self._store = store
        self._pieces = pieces
        self._lists: OrderedDict[str | None, tuple[float, list[TrajectoryMark]]] = OrderedDict()

    async def page(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        """Return one page; NotFound for the cursor of another list."""
        if order == "queue":
            try:
                marks, next_cursor = await self._store.inspection.trajectory_page(state, cursor, limit)
            except DataError as error:
                raise NotFound(str(error), field="cursor") from error
        else:
            first = _first_of(cursor)
            found = await self._all(state)
            marks = in_order(found, descending, lambda m: m.reward if order == "reward" else m.token_count)
            marks = marks[first : first + limit + 1]
            next_cursor = f"{SORTED}:{first + limit}:0" if len(marks) > limit else None
            marks = marks[:limit]
        return TrajectoryPage(items=await self._summaries(marks, preview), next_cursor=next_cursor)

    async def _all(self, state: str | None) -> list[TrajectoryMark]:
        """Return the trajectories in a state, at most ``MOST_SORTED``, as of the last seconds."""
        read_at, found = self._lists.get(state, (-math.inf, []))
        if time.monotonic() - read_at < _KEPT_SECONDS:
            return found
        found, cursor = [], None
        while len(found) < MOST_SORTED:
            marks, cursor = await self._store.inspection.trajectory_page(state, cursor, _READ_AT_ONCE)
            found += marks
            if cursor is None:
                break
        self._lists[state] = time.monotonic(), found[:MOST_SORTED]
        while len(self._lists) > _KEPT_LISTS:
            self._lists.popitem(last=False)
        return self._lists[state][1]

    async def _summaries(self, marks: Sequence[TrajectoryMark], preview: bool) -> list[TrajectorySummary]:
        if not preview:
            return [_summary(mark, None) for mark in marks]
        ends = await self._store.inspection.response_ends([mark.trajectory_id for mark in marks])
        # Decode in a thread: the previews of hundreds of rows take a while.
        parts = [shown_ends(each.first) if each.is_whole else shown_ends(each.first, each.last) for each in ends]
        texts = await asyncio.to_thread(lambda: [preview_of(shown, self._pieces) for shown in parts])
        return [_summary(mark, text) for mark, text in zip(marks, texts, strict=True)]


def _first_of(cursor: str | None) -> int:
    """Return the position of the first row of a sorted page."""
    if cursor is None:
        return 0
    section, first, _ = cursor.split(":")
    if section != SORTED:
        raise NotFound(
            f"cursor {cursor!r} is not one of a sorted list: pass the next cursor of the same list", field="cursor"
        )
    return int(first)


def _summary(mark: TrajectoryMark, preview: str | None) -> TrajectorySummary:
    return TrajectorySummary(
        id=mark.trajectory_id,
        group_id=mark.trajectory_id.rpartition(".")[0],
        state=mark.state,
        tokens=mark.token_count,
        attempts=mark.attempts,
        birth_version=mark.birth_version,
        newest_version=mark.newest_version,
        finish_reason=mark.finish_reason,
        reward=mark.reward,
        train_step=mark.train_step,
        preview=preview,
    )
