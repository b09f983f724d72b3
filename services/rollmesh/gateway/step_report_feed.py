"""Step reports of the trainer, from the run folder if available (complete history), otherwise from the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rollmesh.gateway.curves import Curves
from rollmesh.runtime.growing_files import JsonLinesTail
from rollmesh.store import TrajectoryStore

_REPORTS_PER_LOOK = 500
"""Maximum number of reports read from the queue per poll; later polls read the rest."""


class ReportFeed:
    """Feed of step reports into the curves: each step once, in its newest version."""

    def __init__(self, folder: Path, store: TrajectoryStore, curves: Curves) -> None:
        self._tail = JsonLinesTail(folder / "metrics.jsonl")
        self._store = store
        self._curves = curves
        self._file_is_read = False
        self._newest: tuple[Any, Any] | None = None
        """Step and time of the newest report, to distinguish it from a repeated training of the same step."""

    def read_file(self) -> list[dict[str, Any]]:
        """Return the new reports of the file; blocks, and changes no curve."""
        return self._tail.read()

    def apply_file(self, found: Sequence[Mapping[str, Any]]) -> None:
        """Add the result of the last ``read_file`` to the curves."""
        if not self._tail.exists:
            self.file_lost()
            return
        self._file_is_read = True
        if self._tail.from_start:
            self._remove(0)
        self._show(found)

    def file_lost(self) -> None:
        """Switch to the queue, from the newest shown report on; the file is missing or unreadable."""
        self._file_is_read = False
        # A file that returns is read from its beginning: it has every step, and the queue only the newest.
        self._tail.rewind()

    async def read_queue(self) -> None:
        """Add new reports of the queue to the curves, unless the file provides them.

        After a rollback the trainer replaces all reports after the step it continues from. If the newest shown report
        is still in the queue, no earlier report has changed. Otherwise all reports in the queue are read again.
        """
        if self._file_is_read:
            return
        if self._newest is not None:
            found = await self._store.step_reports.read(self._newest[0], _REPORTS_PER_LOOK + 1)
            if found and _identity(found[0]) == self._newest:
                self._show(found[1:])
                return
        found = await self._store.step_reports.read(0, _REPORTS_PER_LOOK)
        self._remove(found[0]["train_step"] if found else 0)
        self._show(found)

    def _remove(self, from_step: int) -> None:
        self._curves.remove_reports(from_step)
        self._newest = None

    def _show(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if self._curves.add_report(record):
                self._newest = _identity(record)


def _identity(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["train_step"], record.get("time")
