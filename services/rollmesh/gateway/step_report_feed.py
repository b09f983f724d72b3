"""The trainer's step reports: from the run folder where it has them (the whole history), else from the queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.gateway.curves import Curves
from rollmesh.runtime.json_lines import JsonLinesTail
from rollmesh.store import TrajectoryStore

_REPORTS_PER_LOOK = 500
"""Most that one look takes from the queue; what is left comes with the next ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileReports:
    """What one read of the file found."""

    exists: bool
    from_start: bool
    """Read from its first line on: what is known of the file is of before it was written anew."""
    records: Sequence[Mapping[str, Any]]


class ReportFeed:
    """Feeds the curves, each step once, in the newest version that its source has."""

    def __init__(self, folder: Path, store: TrajectoryStore, curves: Curves) -> None:
        self._tail = JsonLinesTail(folder / "metrics.jsonl")
        self._store = store
        self._curves = curves
        self._file_is_read = False
        self._newest: tuple[Any, Any] | None = None
        """Step and time of the newest report taken, which tell it from the same step trained again."""

    def read_file(self) -> FileReports:
        """What is new in the file; blocks, changes no curve."""
        records = self._tail.read()
        return FileReports(exists=self._tail.exists, from_start=self._tail.from_start, records=records)

    def take_file(self, found: FileReports) -> None:
        """Show what ``read_file`` found."""
        if not found.exists:
            self.lose_file()
            return
        self._file_is_read = True
        if found.from_start:
            self._forget(0)
        self._show(found.records)

    def lose_file(self) -> None:
        """The file is not there or cannot be read: the queue goes on from the newest report shown."""
        self._file_is_read = False
        # When it is back, it is read from its start: it has every step, the queue the newest ones.
        self._tail.rewind()

    async def read_queue(self) -> None:
        """Show what is new in the queue, unless the file has it all.

        The trainer replaces every report after the step that it goes on from. So nothing before the newest report shown
        has changed as long as that one is there; once it is gone, all that the queue still has is shown anew.
        """
        if self._file_is_read:
            return
        if self._newest is not None:
            found = await self._store.step_reports(self._newest[0], _REPORTS_PER_LOOK + 1)
            if found and _identity(found[0]) == self._newest:
                self._show(found[1:])
                return
        found = await self._store.step_reports(0, _REPORTS_PER_LOOK)
        self._forget(found[0]["train_step"] if found else 0)
        self._show(found)

    def _forget(self, from_step: int) -> None:
        self._curves.forget_reports(from_step)
        self._newest = None

    def _show(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            if self._curves.add_report(record):
                self._newest = _identity(record)


def _identity(record: Mapping[str, Any]) -> tuple[Any, Any]:
    return record["train_step"], record.get("time")
