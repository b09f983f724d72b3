"""Rows of supervised fine-tuning: token ids, and which of them are targets of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollmesh.config.sft_rows import RowOptions
from rollmesh.errors import DataError
from rollmesh.tasks.sources.rows import Row
from rollmesh.tasks.sources.tables import JsonlRows
from rollmesh.text import Tokenizer
from rollmesh.types import BoolArray, Int32Array


@dataclass(frozen=True, slots=True)
class SftRow:
    """One example."""

    token_ids: Int32Array  # [tokens]
    loss_mask: BoolArray  # [tokens], True where the token is a target of the loss


def read_rows(
    files: Sequence[str | Path], tokenizer: Tokenizer, options: RowOptions, context_length: int
) -> list[SftRow]:
    """Read the rows of all files, in order. Raises DataError, which names the file and the line."""
    found: list[SftRow] = []
    for file in files:
        rows = JsonlRows(file)
        if not len(rows):
            raise DataError(f"{file}: has no rows; write one JSON object on each line")
        found += [_read(rows.row(number), tokenizer, options, context_length) for number in range(len(rows))]
    return found


def _read(row: Row, tokenizer: Tokenizer, options: RowOptions, context_length: int) -> SftRow:
    texts = []
    for field in (options.prompt_field, options.response_field):
        value = row.fields.get(field)
        if not isinstance(value, str) or not value:
            raise DataError(f"{row.where}: {field} is {value!r}; expected a text that is not empty")
        texts.append(value)
    prompt, response = tokenizer.encode(texts[0], special_tokens=True), tokenizer.encode(texts[1])
    ids = np.concatenate([prompt, response])
    if len(ids) > context_length:
        raise DataError(
            f"{row.where}: {len(ids)} tokens, more than the context of {context_length}; shorten or leave out the row"
        )
    return SftRow(token_ids=ids, loss_mask=np.arange(len(ids)) >= len(prompt))
