"""Thread that makes the blocking calls of one object, in order."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class OwnThread:
    """Daemon thread: its object sees one thread, and a call that hangs holds up neither others nor the process."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    async def call(self, function: Callable[[], T]) -> T:
        """Return the result of a function."""
        future: Future[T] = Future()
        self._calls.put((future, function))
        return await asyncio.wrap_future(future)

    def end(self, last: Callable[[], Any]) -> None:
        """End the thread after the calls so far and a last one, whose errors nobody needs."""
        self._calls.put((Future(), last))
        self._calls.put(None)

    def _work(self) -> None:
        while (item := self._calls.get()) is not None:
            future, function = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except Exception as error:
                # No future takes a StopIteration.
                future.set_exception(RuntimeError(repr(error)) if isinstance(error, StopIteration) else error)
            except BaseException as error:  # an exit of the user's code ends its episode, not the process
                future.set_exception(RuntimeError(repr(error)))
