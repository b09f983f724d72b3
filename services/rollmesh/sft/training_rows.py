"""Rows of supervised fine-tuning: token ids, and which of them are targets of the loss."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rollmesh.config.sft_config import RowOptions
from rollmesh.errors import DataError
from rollmesh.runtime.logging import get_logger
from rollmesh.sft.chats import ChatTokens
from rollmesh.tasks.sources.rows import Row
from rollmesh.tasks.sources.tables import open_file
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
    """Read the rows of all files, in order. Raises DataError with the file, the line and the field of a bad row."""
    reader = _RowTokens(tokenizer, options)
    found: list[SftRow] = []
    dropped = 0
    for file in files:
        rows = open_file(file)
        if not len(rows):
            raise DataError(f"{file}: has no rows; write one JSON object on each line")
        for number in range(len(rows)):
            row = rows.row(number)
            example = reader.read(row)
            if len(example.token_ids) <= context_length:
                found.append(example)
            elif options.too_long == "drop":
                dropped += 1
            else:
                raise DataError(
                    f"{row.where}: {len(example.token_ids)} tokens, more than {context_length} (data.max_tokens, or "
                    "the model's positions); shorten or leave out the row, or set data.too_long: drop"
                )
    if dropped:
        get_logger("sft").warning("rows_dropped", longer_than=context_length, dropped=dropped, kept=len(found))
    if not found:
        raise DataError(f"{', '.join(map(str, files))}: all {dropped} rows are longer than {context_length} tokens")
    return found


class _RowTokens:
    def __init__(self, tokenizer: Tokenizer, options: RowOptions) -> None:
        self._tokenizer = tokenizer
        self._options = options
        self._chats = ChatTokens(tokenizer, options.chat_template_kwargs)

    def read(self, row: Row) -> SftRow:
        options = self._options
        if row.fields.get(options.messages_field) is not None:
            ids, mask = self._chat(row)
        elif options.messages_field in row.fields or row.fields.keys() & {options.prompt_field, options.response_field}:
            ids, mask = self._texts(row)
        else:
            raise DataError(
                f"{row.where}: has neither {options.messages_field!r}, nor {options.prompt_field!r} and "
                f"{options.response_field!r}; its fields are {', '.join(row.fields) or 'none'}; name those that you "
                "mean with data.messages_field, data.prompt_field and data.response_field"
            )
        return SftRow(token_ids=ids, loss_mask=mask)

    def _texts(self, row: Row) -> tuple[Int32Array, BoolArray]:
        """Encode prompt and response apart, as a generator reads one and writes the other."""
        prompt = self._encoded(row, self._options.prompt_field, special_tokens=True)
        response = self._encoded(row, self._options.response_field)
        end = self._tokenizer.end_token_id
        if end is not None and response[-1] not in self._tokenizer.eos_token_ids:
            response = np.append(response, np.int32(end))
        ids = np.concatenate([prompt, response])
        return ids, np.arange(len(ids)) >= len(prompt)

    def _encoded(self, row: Row, field: str, *, special_tokens: bool = False) -> Int32Array:
        value = row.required(field)
        if not isinstance(value, str) or not value.strip():
            raise DataError(
                f"{row.where}: field {field!r} is {value!r:.80}; write a text that is not empty, "
                f"or a chat into {self._options.messages_field!r}"
            )
        try:
            ids = self._tokenizer.encode(value, special_tokens=special_tokens)
        except DataError as error:
            raise DataError(f"{row.where}: field {field!r}: {error}") from error
        if field == self._options.response_field:
            if not len(ids):
                raise DataError(f"{row.where}: field {field!r} is {value!r:.80}, which the tokenizer reads as no token")
            self._check_known(ids, f"{row.where}: field {field!r}")
        return ids

    def _chat(self, row: Row) -> tuple[Int32Array, BoolArray]:
        field = f"{row.where}: field {self._options.messages_field!r}"
        try:
            ids, mask = self._chats.read(
                row.fields[self._options.messages_field], row.fields.get(self._options.tools_field)
            )
        except DataError as error:
            raise DataError(f"{field}: {error}") from error
        self._check_known(ids[mask], field)
        return ids, mask

    def _check_known(self, targets: Int32Array, field: str) -> None:
        if self._tokenizer.unknown_token_id in targets.tolist():
            raise DataError(
                f"{field}: a word that is trained on is not in the vocabulary of {self._tokenizer.folder}; correct or "
                "leave out the row: the model would learn to write the token of unknown words"
            )
