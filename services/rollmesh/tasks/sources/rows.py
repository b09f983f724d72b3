"""Prompts from a finite table: order, epochs and rows held out for evaluation."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.errors import DataError
from rollmesh.tasks.sources.row import Row, RowFormat, check_row, domain_of_row, prompt_from_row, prompt_value
from rollmesh.tasks.sources.source_protocol import OnChecked, SourceRows, SourceSettings, Split
from rollmesh.types import Prompt

_ROWS_PER_REPORT = 1024


class RowReader(Protocol):
    """Random access to the rows of a file or a sequence."""

    name: str
    """Name of the table in messages."""

    def __len__(self) -> int: ...

    def row(self, number: int) -> Row:
        """Return row ``number``, counted from 0. Raises DataError if it cannot be read."""

    def prompt_id(self, number: int) -> str:
        """Return the id of the prompt of a row, without reading the row."""


class RowPrompts:
    """Prompt source over rows; every row is checked once, when the source is opened.

    Rows whose prompts are equal are held out together, so an evaluation prompt is never trained on.
    """

    def __init__(self, reader: RowReader, form: RowFormat, settings: SourceSettings) -> None:
        """Check all rows. Raises DataError for the first bad row, and if the split has no rows."""
        self._reader = reader
        self._form = form
        self._settings = settings
        split = settings.split
        self._shuffle = settings.shuffle or split == "eval"
        self._count = len(reader) if settings.first_rows is None else min(len(reader), settings.first_rows)
        domains: list[str] = []
        self._domains = domains
        self._digest = hashlib.blake2b(digest_size=8)
        hashes = np.fromiter(self._checked(settings.on_checked), np.uint64, self._count)
        self._rows = _rows_of_split(hashes, split, settings.held_out_ratio)
        if len(self._rows) == 0 and 0 < self._count < len(reader):
            # The first rows of a table may all have one prompt, and then none is held out.
            self._rows = np.arange(self._count)
        self._domains = [domains[number] for number in self._rows] if domains else []
        if len(self._rows) == 0:
            problem = "no rows" if len(reader) == 0 else f"no rows for the {split} split; it has {len(reader)} in all"
            raise DataError(f"{reader.name}: {problem} (data.held_out_ratio={settings.held_out_ratio})")
        self._orders = EpochOrders(len(self._rows), settings.seed)

    @property
    def epoch_size(self) -> int:
        """Number of rows in the split."""
        return len(self._rows)

    @property
    def content(self) -> str:
        return f"{self._count} rows {self._digest.hexdigest()}"

    def prompt(self, epoch: int, index: int) -> Prompt:
        if epoch < 0 or not 0 <= index < len(self._rows):
            raise IndexError(f"{self._reader.name}: no position (epoch {epoch}, index {index})")
        at = self._orders.row(epoch, index) if self._shuffle else index
        return self.drawn(at, epoch, index)

    def rows(self) -> SourceRows:
        count = len(self._rows)
        return SourceRows(
            names=[self._reader.prompt_id(int(number)) for number in self._rows],
            domains=self._domains or [""] * count,
            endless=[False] * count,
        )

    def drawn(self, row: int, epoch: int, index: int) -> Prompt:
        return prompt_from_row(self._reader.row(int(self._rows[row])), self._form, self._settings)

    def _checked(self, on_checked: OnChecked | None) -> Iterator[int]:
        for number in range(self._count):
            if on_checked is not None and number % _ROWS_PER_REPORT == 0:
                on_checked(number, self._count)
            yield self._check(number)

    def _check(self, number: int) -> int:
        row = self._reader.row(number)
        check_row(row, self._form, self._settings)
        if self._settings.domain_field is not None:
            self._domains.append(domain_of_row(row, self._settings.domain_field))
        self._digest.update(json.dumps(row.fields, sort_keys=True, default=str).encode() + b"\n")
        content = json.dumps(prompt_value(row, self._form), sort_keys=True, default=str).encode()
        return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "big")


def _rows_of_split(hashes: npt.NDArray[np.uint64], split: Split, held_out_ratio: float) -> Int64Array:
    distinct = np.unique(hashes)
    if held_out_ratio == 0:
        held_out = np.full(len(hashes), split == "eval")
    elif len(distinct) < 2:
        held_out = np.zeros(len(hashes), np.bool_)
    else:
        count = min(max(1, round(held_out_ratio * len(distinct))), len(distinct) - 1)
        held_out = hashes <= distinct[count - 1]
    return np.flatnonzero(held_out == (split == "eval")).astype(np.int64)


Int64Array = npt.NDArray[np.int64]


class EpochOrders:
    """Orders of the rows of one source. The order used last is kept: to sort a large table takes long."""

    def __init__(self, size: int, seed: int) -> None:
        self._size = size
        self._seed = seed
        self._kept: tuple[int, Int64Array] | None = None
        """(epoch, order)."""

    def row(self, epoch: int, index: int) -> int:
        """Return the row at a position of an epoch."""
        kept = self._kept
        if kept is None or kept[0] != epoch:
            kept = self._kept = (epoch, epoch_order(self._size, self._seed, epoch))
        return int(kept[1][index])


def epoch_order(size: int, seed: int, epoch: int) -> Int64Array:
    """Return a permutation of range(size), int64 [size], read-only; O(size log size)."""
    digest = hashlib.blake2b(f"{seed}:{epoch}".encode(), digest_size=8).digest()
    key = np.uint64(int.from_bytes(digest, "big"))
    hashes = _splitmix64(np.arange(size, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + key)
    order = np.argsort(hashes, kind="stable")
    order.setflags(write=False)
    return order


def _splitmix64(value: npt.NDArray[np.uint64]) -> npt.NDArray[Any]:
    """Apply the finaliser of splitmix64 (Steele, Lea and Flood, 2014), a bijection that mixes every bit."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))
