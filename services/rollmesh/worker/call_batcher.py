"""Group commit for asyncio: many callers, one batched call at a time per lane.

While a batch is under way, what arrives next waits and travels together: batches grow by themselves when the other
side is slow, and a lone item pays no delay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Generic, TypeVar

T = TypeVar("T")
R = TypeVar("R")


class CallBatcher(Generic[T, R]):
    """Coalesces items into calls of at most ``limit``; ``runners`` calls may be under way at once."""

    def __init__(self, call: Callable[[list[T]], Awaitable[Sequence[R]]], *, limit: int, runners: int = 1) -> None:
        self._call = call
        self._limit = limit
        self._runners = runners
        self._items: list[tuple[T, asyncio.Future[R]]] = []
        self._running = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def submit(self, item: T) -> R:
        """The result of one item; whatever the batched call raises, every item of the batch raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[R] = loop.create_future()
        self._items.append((item, future))
        if self._running < self._runners:
            self._running += 1
            # One loop tick later: everything that becomes ready in this tick joins the first batch.
            loop.call_soon(self._start)
        return await future

    @property
    def waiting(self) -> int:
        """Items that no call has taken yet."""
        return len(self._items)

    def _start(self) -> None:
        task = asyncio.ensure_future(self._drain())
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.result()

    async def _drain(self) -> None:
        try:
            while self._items:
                batch, self._items = self._items[: self._limit], self._items[self._limit :]
                wanted = [(item, future) for item, future in batch if not future.cancelled()]
                if wanted:
                    await self._run([item for item, _ in wanted], [future for _, future in wanted])
        finally:
            # In the same step as the last look at the items: whoever submits next must start a runner again.
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
