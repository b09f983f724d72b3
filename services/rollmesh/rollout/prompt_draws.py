"""Draws of prompts: the leader's copy of the prompt history, and the choice of a sampler."""

from __future__ import annotations

from dataclasses import dataclass

from rollmesh.curriculum.history_table import HistoryTable, prompt_table
from rollmesh.curriculum.sampler_protocol import Draw, PromptSampler
from rollmesh.mesh import Cursor
from rollmesh.store.prompt_records import PromptRecords
from rollmesh.tasks.sources.source_protocol import RowSource
from rollmesh.types import Prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnPrompt:
    """Prompt of one draw."""

    prompt: Prompt
    record_name: str
    """Record of the prompt history that its group adds to."""


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

    def draw(self, cursor: Cursor) -> DrawnPrompt:
        """Choose the prompt at a cursor. Raises DataError if the sampler fails."""
        draw = Draw(epoch=cursor.epoch, index=cursor.index, seed=self._seed)
        row = self._sampler.choose(draw, self._table, self._history.columns, self._train_step)
        self._history.begin(row)
        return DrawnPrompt(
            prompt=self._source.drawn(row, cursor.epoch, cursor.index), record_name=self._table.names[row]
        )
