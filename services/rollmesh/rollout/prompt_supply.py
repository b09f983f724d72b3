"""Prompts of the leader: opened in a thread, and drawn by the sampler of a run."""

import asyncio
import threading
import time
from collections.abc import Callable

from rollmesh.curriculum.prompt_tables import Draw, HistoryTable, prompt_table
from rollmesh.curriculum.samplers import PromptSampler
from rollmesh.mesh import Cursor
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.logging import get_logger
from rollmesh.store.prompt_records import PromptRecords
from rollmesh.tasks.sources.source_protocol import OnChecked, PromptSource, RowSource
from rollmesh.types import Prompt

OpenPrompts = Callable[[OnChecked], PromptSource]

_BEAT_SECONDS = 1.0
_REPORT_SECONDS = 10.0


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


class PromptDraws:
    """Prompts of a run that has a sampler.

    The copy of the history follows the records that change. The prompts in progress are read before each admission,
    so a new leader chooses as the one before.
    """

    def __init__(self, source: RowSource, sampler: PromptSampler, records: PromptRecords, seed: int) -> None:
        rows = source.rows()
        self._source = source
        self._sampler = sampler
        self._records = records
        self._seed = seed
        self._table = prompt_table(rows.names, rows.domains, rows.endless, rows.weights)
        self._history = HistoryTable(self._table)
        self._newest_change: int | None = None
        self._train_step = 0

    def forget(self) -> None:
        """Read the whole history again: Redis may have been restored to an earlier state."""
        self._newest_change = None

    async def refresh(self, train_step: int) -> None:
        """Read the records that have changed, and the prompts in progress, before an admission."""
        whole = self._newest_change is None
        self._newest_change, records = await self._records.changed(self._newest_change)
        if whole:
            self._history.clear()
        self._history.update(records)
        self._history.set_in_progress(await self._records.in_progress())
        self._train_step = train_step

    def draw(self, cursor: Cursor) -> tuple[Prompt, str]:
        """Return the prompt at a cursor, and the record of the prompt history that its group adds to.

        Raises DataError if the sampler fails.
        """
        draw = Draw(epoch=cursor.epoch, index=cursor.index, seed=self._seed)
        row = self._sampler.choose(draw, self._table, self._history.columns, self._train_step)
        self._history.begin(row)
        return self._source.drawn(row, cursor.epoch, cursor.index), self._table.names[row]
