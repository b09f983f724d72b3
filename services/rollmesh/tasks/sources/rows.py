"""Prompts of a finite number of rows: order, epochs and rows held out for evaluation."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.errors import DataError
from rollmesh.tasks.sources.row import Row, RowFormat, check_row, domain_of_row, prompt_from_row, prompt_value
from rollmesh.tasks.sources.source_protocol import SourceRows, SourceSettings
from rollmesh.types import Prompt

_ROWS_PER_REPORT = 1024


class FinitePrompts(ABC):
    """Prompts of a fixed number of rows; with ``shuffle`` every epoch has them in another order."""

    def __init__(self, name: str, size: int, seed: int, *, shuffle: bool) -> None:
        """``name`` is that of the source in messages."""
        self._name = name
        self._size = size
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, np.int64))
        """(epoch, order) used last: to sort a large table takes long."""

    @property
    def epoch_size(self) -> int:
        """Number of rows."""
        return self._size

    def prompt(self, epoch: int, index: int) -> Prompt:
        if epoch < 0 or not 0 <= index < self._size:
            raise IndexError(f"{self._name}: no position (epoch {epoch}, index {index})")
        if not self._shuffle:
            return self.drawn(index, epoch, index)
        if self._order[0] != epoch:
            self._order = (epoch, epoch_order(self._size, self._seed, epoch))
        return self.drawn(int(self._order[1][index]), epoch, index)

    @abstractmethod
    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        """Return the prompt of a row."""


class RowReader(Protocol):
    """Random access to the rows of a file or a sequence."""

    name: str
    """Name of the table in messages."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Return row ``number``, counted from 0. Raises DataError if it cannot be read."""

    def prompt_id(self, number: int) -> str:
        """Return the id of the prompt of a row, without reading the row."""


class RowPrompts(FinitePrompts):
    """Prompt source over rows; every row is checked once, when the source is opened.

    Rows whose prompts are equal are held out together, so an evaluation prompt is never trained on.
    """

    def __init__(self, reader: RowReader, form: RowFormat, settings: SourceSettings) -> None:
        """Check all rows. Raises DataError for the first bad row, and if the split has no rows."""
        self._reader = reader
        self._form = form
        self._settings = settings
        self._count = len(reader) if settings.first_rows is None else min(len(reader), settings.first_rows)
        self._all_domains: list[str] = []
        self._digest = hashlib.blake2b(digest_size=8)
        numbers = self._numbers_of_split(np.fromiter(self._checked(), np.uint64, self._count))
        if len(numbers) == 0 and 0 < self._count < len(reader):
            # The first rows of a table may all have one prompt, and then none is held out.
            numbers = np.arange(self._count)
        if len(numbers) == 0:
            split, count = settings.split, len(reader)
            problem = "no rows" if count == 0 else f"no rows for the {split} split; it has {count} in all"
            raise DataError(f"{reader.name}: {problem} (data.held_out_ratio={settings.held_out_ratio})")
        self._numbers = numbers
        shuffle = settings.shuffle or settings.split == "eval"
        super().__init__(reader.name, len(numbers), settings.seed, shuffle=shuffle)

    @property
    def content(self) -> str:
        return f"{self._count} rows {self._digest.hexdigest()}"

    def rows(self) -> SourceRows:
        domains = self._all_domains
        return SourceRows(
            names=[self._reader.prompt_id(int(number)) for number in self._numbers],
            domains=[domains[number] if domains else "" for number in self._numbers],
            endless=[False] * self._size,
        )

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        return prompt_from_row(self._reader.row(int(self._numbers[row])), self._form, self._settings)

    def _checked(self) -> Iterator[int]:
        """Check the rows, and yield a hash of the prompt of each."""
        settings = self._settings
        for number in range(self._count):
            if settings.on_checked is not None and number % _ROWS_PER_REPORT == 0:
                settings.on_checked(number, self._count)
            row = self._reader.row(number)
            check_row(row, self._form, settings)
            if settings.domain_field is not None:
                self._all_domains.append(domain_of_row(row, settings.domain_field))
            self._digest.update(json.dumps(row.fields, sort_keys=True, default=str).encode() + b"\n")
            content = json.dumps(prompt_value(row, self._form), sort_keys=True, default=str).encode()
            yield int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")

    def _numbers_of_split(self, hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        distinct, ratio = np.unique(hashes), self._settings.held_out_ratio
        is_eval = self._settings.split == "eval"
        if ratio == 0:
            held_out = np.full(len(hashes), is_eval)
        elif len(distinct) < 2:
            held_out = np.zeros(len(hashes), np.bool_)
        else:
            count = min(max(1, round(ratio * len(distinct))), len(distinct) - 1)
            held_out = hashes <= distinct[count - 1]
        return np.flatnonzero(held_out == is_eval).astype(np.int64)


def epoch_order(size: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    """Return a permutation of range(size), int64 [size], read-only, a function of (seed, epoch); O(size log size).

    numpy and random do not guarantee a stable shuffle across releases, and a cursor outlives an upgrade. So rows are
    sorted by the finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection that mixes every bit.
    """
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "big"))
    value = np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    order = np.argsort(value ^ (value >> np.uint64(31)), kind="stable")
    order.setflags(write=False)
    return order
