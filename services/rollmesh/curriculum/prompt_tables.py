"""Inputs of a sampler: the draw, the rows of the prompts, and their history as one column per sum."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollmesh.prompt_history import PromptRecord, domain_record
from rollmesh.types import BoolArray, Float64Array, Int64Array


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """One draw of a prompt: the position of its group, and the only source of chance of a sampler."""

    epoch: int
    index: int
    seed: int
    """Seed of the run."""

    def uniform(self, name: str) -> float:
        """Return a number in [0, 1), a function of the draw and of ``name``."""
        text = f"{self.seed}:{self.epoch}:{self.index}:{name}".encode()
        return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") / 2**64


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTable:
    """Rows of the training prompts; a row is a number in [0, row_count)."""

    row_count: int
    names: Sequence[str] = field(repr=False)  # [rows]
    """Name of the record in the prompt history."""
    domains: tuple[str, ...]
    """Names of the domains, sorted; one empty name without domains."""
    domain_of: Int64Array = field(repr=False)  # [rows]
    """Position in ``domains``."""
    weights: Mapping[str, float]
    """Weight of every domain of a mixture; empty for other sources."""
    endless: BoolArray = field(repr=False)  # [rows]
    """True for a row that gives a new prompt at every draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class History:
    """Results of the groups of each row so far, filtered ones included; read-only for samplers."""

    groups: Int64Array  # [rows]
    """Groups that have ended or were evicted."""
    members: Int64Array  # [rows]
    """Scored trajectories of these groups."""
    solved: Int64Array  # [rows]
    """Trajectories with a positive outcome of the verifier, or without one a positive reward."""
    reward_sums: Float64Array  # [rows]
    """Sums of the shaped rewards."""
    token_sums: Int64Array  # [rows]
    """Tokens after the prompt."""
    in_progress: Int64Array  # [rows]
    """Groups that are admitted and have not ended."""
    domains: Mapping[str, PromptRecord]
    """Sums over all groups of a domain that have ended; domains without one are left out."""


Sampler = Callable[..., int]
"""(Draw, PromptTable, History, newest trained step, options as keywords) -> row of the prompt.

A pure function, so that any leader chooses the same.
"""


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
        groups, members, solved, token_sums, in_progress = np.zeros((5, table.row_count), np.int64)
        self.columns = History(
            groups=groups,
            members=members,
            solved=solved,
            reward_sums=np.zeros(table.row_count),
            token_sums=token_sums,
            in_progress=in_progress,
            domains=self._domains,
        )

    def clear(self) -> None:
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
                self.begin(row)

    def begin(self, row: int) -> None:
        self.columns.in_progress[row] += 1
