"""Group commit for asyncio: many callers share one batched call at a time.

Items that arrive during a call wait and form the next batch. Batches therefore grow while the callee is slow, and a
single item is not delayed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

from rollmesh.runtime.tasks import BackgroundTasks

T = TypeVar("T")
R = TypeVar("R")


class CallBatcher(Generic[T, R]):
    """Batcher that sends items in calls of at most ``limit`` items, with at most ``runners`` calls in progress."""

    def __init__(self, call: Callable[[list[T]], Awaitable[Sequence[R]]], *, limit: int, runners: int = 1) -> None:
        self._call = call
        self._limit = limit
        self._runners = runners
        self._items: list[tuple[T, asyncio.Future[R]]] = []
        self._running = 0
        self._tasks = BackgroundTasks()

    async def submit(self, item: T) -> R:
        """Return the result of one item; an error of the batched call is raised for every item of its batch."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._items.append((item, future))
        if self._running < self._runners:
            self._running += 1
            # Start one loop tick later: every item submitted in this tick joins the first batch.
            loop.call_soon(lambda: self._tasks.start(self._drain()))
        return await future

    @property
    def waiting(self) -> int:
        """Number of items that are not part of a call yet."""
        return len(self._items)

    async def _drain(self) -> None:
        try:
            while self._items:
                batch, self._items = self._items[: self._limit], self._items[self._limit :]
                wanted = [(item, future) for item, future in batch if not future.cancelled()]
                if wanted:
                    await self._run([item for item, _ in wanted], [future for _, future in wanted])
        finally:
            # In the same step as the last check of the items: the next submit must start a runner again.
            self._running -= 1

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
