"""Lists of the trajectories in the queue: in its order, or sorted by reward or length, with previews of their text."""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Sequence

from rollmesh.errors import DataError
from rollmesh.gateway.archive import Pieces, in_order, preview_of, shown_ends
from rollmesh.gateway.models.items import QueueOrder, TrajectoryPage, TrajectorySummary
from rollmesh.runtime.request_guard import NotFound
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import SORTED, TrajectoryMark

MOST_SORTED = 20_000
"""Trajectories that are sorted, the oldest groups first."""
_READ_AT_ONCE = 2048
_KEPT_SECONDS = 2.0
"""Time that a list of the queue serves further sorted pages."""
_KEPT_LISTS = 4


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
