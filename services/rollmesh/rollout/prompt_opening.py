"""Check of a run's prompts in a thread: a million rows take longer than a loop may go without a beat."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable

from rollmesh.errors import DataError
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.store import TrajectoryStore
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource

OpenPrompts = Callable[[OnChecked], PromptSource]

_BEAT_SECONDS = 1.0
_REPORT_SECONDS = 10.0


async def check_content(store: TrajectoryStore, setting: str, content: str, epoch_size: int | None = None) -> None:
    """Record the files behind a setting, as digests, with the run; raises DataError if the run has used others.

    Its progress is a position in the order of rows, its audit counts them, and its evaluations are compared.
    """
    began = await store.leadership.record_content(setting, content, epoch_size)
    if began != content:
        raise DataError(
            f"{setting}: the files have changed since the run began: {began} then, {content} now (digests); restore "
            "them, or start another run in another folder"
        )


class _Stopped(Exception):
    """The process shuts down."""


async def open_prompts(
    open_source: OpenPrompts, *, beat: Callable[[], None], shutdown: Shutdown
) -> PromptSource | None:
    """Open the prompts in a thread, with a beat every second and a log line every 10 s; returns None on shutdown.

    Raises the errors of the source: DataError for the first invalid row.
    """
    log, stopped, started = get_logger("prompts"), threading.Event(), time.monotonic()
    checked_rows, row_count, report_due = 0, 0, started + _REPORT_SECONDS

    def on_checked(checked: int, count: int) -> None:
        nonlocal checked_rows, row_count
        checked_rows, row_count = checked, count
        if stopped.is_set():
            raise _Stopped

    opening = asyncio.create_task(asyncio.to_thread(open_source, on_checked), name="open prompts")
    opening.add_done_callback(lambda task: task.cancelled() or task.exception())
    stop = asyncio.ensure_future(shutdown.wait())
    try:
        while not opening.done() and not stop.done():
            beat()
            await asyncio.wait({opening, stop}, timeout=_BEAT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            if time.monotonic() >= report_due:
                report_due += _REPORT_SECONDS
                seconds = round(time.monotonic() - started)
                log.info("prompts_are_opened", checked_rows=checked_rows, rows=row_count, seconds=seconds)
        return opening.result() if opening.done() else None
    finally:
        stopped.set()  # the thread ends at its next report, which lets the process end
        stop.cancel()
