"""Executor for the torch calls of a trainer process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class TorchExecutor(ThreadPoolExecutor):
    """Executor with one thread, for every torch call of this process, in order."""

    def __init__(self) -> None:
        super().__init__(1, thread_name_prefix="torch")
        self._pending: set[Future[Any]] = set()

    def busy(self) -> bool:
        """Tell whether a call runs or waits for the thread."""
        return bool(self._pending)

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future = super().submit(fn, *args, **kwargs)
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future
