"""Background tasks, retries with back-off, and the end of tasks."""

import asyncio
import math
import random
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

MOST_CHARACTERS = 8192
"""Length of a text from which work on it has a thread of its own."""


class BackgroundTasks:
    """Tasks without an awaiting caller, referenced until they end; the event loop holds only weak references."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    def __iter__(self) -> Iterator[asyncio.Task[None]]:
        return iter(tuple(self._tasks))

    def start(self, work: Coroutine[Any, Any, None], name: str | None = None) -> asyncio.Task[None]:
        """Start a task."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def cancel(self) -> None:
        """Cancel all tasks and wait for their ends."""
        await cancel_and_wait(*self._tasks)


async def aside(work: Callable[[], T], characters: int) -> T:
    """Return ``work()`` on a text of this length, run in a thread unless the text is short.

    A thread waits milliseconds for the interpreter while the loop is busy, longer than a short text takes.
    """
    return work() if characters < MOST_CHARACTERS else await asyncio.to_thread(work)


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> list[Any]:
    """Cancel the tasks and wait for their ends; returns their results and errors, in order."""
    for task in tasks:
        task.cancel()
    return await asyncio.gather(*tasks, return_exceptions=True)


class AwaitedTaskCancelled(RuntimeError):
    """A task or future that the current task awaited was cancelled."""


@contextmanager
def cancelled_awaits_as_errors() -> Iterator[None]:
    """Raise AwaitedTaskCancelled for a CancelledError that does not come from a cancellation of the current task.

    User code raises such an error if its library cancels a task that it awaits. The current task must not end as
    cancelled then: no error would be seen.
    """
    try:
        yield
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise AwaitedTaskCancelled("an awaited task was cancelled") from error


def raise_first_error(results: Iterable[object]) -> None:
    """Raise the first error among the results of ended tasks; a cancellation is not an error."""
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, asyncio.CancelledError):
            raise result


E = TypeVar("E", bound=Exception)

_MOST_DOUBLINGS = 60
"""Maximum number of doublings; an outage of days would otherwise exceed the range of a float."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Backoff:
    """Delays between attempts: doubled after every failure, up to a limit."""

    first_seconds: float
    longest_seconds: float = math.inf
    jitter: float = 0.0
    """Largest relative deviation of a delay; it spreads the retries of clients that fail together."""

    def seconds(self, failure_count: int) -> float:
        """Return the delay after ``failure_count`` failures, at least one."""
        doubled = self.first_seconds * 2.0 ** min(failure_count - 1, _MOST_DOUBLINGS)
        delay = min(doubled, self.longest_seconds)
        return delay * random.uniform(1 - self.jitter, 1 + self.jitter) if self.jitter else delay


async def retry(
    action: Callable[[], Awaitable[T]],
    error_type: type[E],
    backoff: Backoff,
    wait: Callable[[E, float], Awaitable[None]],
) -> T:
    """Return the result of ``action``, retried after every ``error_type``.

    ``wait`` receives the error and the delay. It returns at the time of the next attempt, or raises to end the retries.
    """
    failure_count = 0
    while True:
        try:
            return await action()
        except error_type as error:
            failure_count += 1
            await wait(error, backoff.seconds(failure_count))
