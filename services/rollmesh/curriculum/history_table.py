"""Copy of the prompt history as one column per sum, which samplers read without a loop over rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from rollmesh.curriculum.sampler_protocol import History, Int64Array, PromptTable
from rollmesh.prompt_history import PromptRecord, domain_record


def prompt_table(
    names: Sequence[str], domains: Sequence[str], endless: Sequence[bool], weights: Mapping[str, float]
) -> PromptTable:
    """Build the table of the rows; ``domains`` has the domain of every row."""
    known = tuple(sorted(set(domains)))
    places = {domain: at for at, domain in enumerate(known)}
    return PromptTable(
        row_count=len(names),
        names=names,
        domains=known,
        domain_of=np.fromiter((places[domain] for domain in domains), np.int64, len(domains)),
        weights=weights,
        endless=np.array(endless, np.bool_),
    )


class HistoryTable:
    """Columns of the history, kept up to date record by record."""

    def __init__(self, table: PromptTable) -> None:
        self._rows = {name: row for row, name in enumerate(table.names)}
        self._domain_of_record = {domain_record(domain): domain for domain in table.domains if domain}
        self._domains: dict[str, PromptRecord] = {}
        self.columns = History(
            groups=_zeros(table),
            members=_zeros(table),
            solved=_zeros(table),
            reward_sums=np.zeros(table.row_count),
            token_sums=_zeros(table),
            in_progress=_zeros(table),
            domains=self._domains,
        )

    def clear(self) -> None:
        """Forget all records."""
        columns = self.columns
        for column in (columns.groups, columns.members, columns.solved, columns.token_sums):
            column[:] = 0
        columns.reward_sums[:] = 0.0
        self._domains.clear()

    def update(self, records: Mapping[str, PromptRecord]) -> None:
        """Replace these records, by name; those of prompts that the data no longer has are left out."""
        columns = self.columns
        for name, record in records.items():
            if (row := self._rows.get(name)) is not None:
                columns.groups[row] = record.groups
                columns.members[row] = record.members
                columns.solved[row] = record.solved
                columns.reward_sums[row] = record.reward_sum
                columns.token_sums[row] = record.token_sum
            elif (domain := self._domain_of_record.get(name)) is not None:
                self._domains[domain] = record

    def set_in_progress(self, names: Iterable[str]) -> None:
        """Set the unfinished groups of every row, from the record name of each group."""
        self.columns.in_progress[:] = 0
        for name in names:
            if (row := self._rows.get(name)) is not None:
                self.columns.in_progress[row] += 1

    def begin(self, row: int) -> None:
        """Count one more unfinished group of a row."""
        self.columns.in_progress[row] += 1


def _zeros(table: PromptTable) -> Int64Array:
    return np.zeros(table.row_count, np.int64)
