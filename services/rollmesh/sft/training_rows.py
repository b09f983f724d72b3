"""Rows of supervised fine-tuning: token ids and targets, the order of the rows, and a batch of them as flat columns."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from rollmesh.config.sft_config import RowOptions
from rollmesh.errors import DataError
from rollmesh.runtime.logging import get_logger
from rollmesh.sft.chats import ChatTokens
from rollmesh.tasks.sources.rows import Row, epoch_order
from rollmesh.tasks.sources.tables import open_file
from rollmesh.text import Tokenizer
from rollmesh.trainer.learner.train_batch import TokenBatch
from rollmesh.types import BoolArray, Int32Array, Int64Array


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


@dataclass(slots=True)
class EpochOrder:
    """Batches of rows by step. An epoch has every row once; its last batch has the rest of them."""

    size: int
    """Number of rows."""
    batch_rows: int
    seed: int
    shuffle: bool
    _epoch: tuple[int, Int64Array] = field(default=(-1, np.empty(0, np.int64)), init=False, repr=False)
    """(epoch, order) used last."""

    @property
    def epoch_steps(self) -> int:
        """Number of batches of an epoch."""
        return -(-self.size // self.batch_rows)

    def rows(self, train_step: int) -> Int64Array:
        """Return the numbers of the rows of a train step, from 1 on, int64 [at most batch_rows]."""
        epoch, index = divmod(train_step - 1, self.epoch_steps)
        if not self.shuffle:
            epoch = 0
        if self._epoch[0] != epoch:
            order = epoch_order(self.size, self.seed, epoch) if self.shuffle else np.arange(self.size, dtype=np.int64)
            self._epoch = epoch, order
        return self._epoch[1][index * self.batch_rows : (index + 1) * self.batch_rows]


def token_batch(rows: Sequence[SftRow]) -> TokenBatch:
    """Concatenate rows. The first token of a row is no target, because nothing predicts it."""
    masks = [row.loss_mask & (np.arange(len(row.loss_mask)) > 0) for row in rows]
    token_ids = np.concatenate([row.token_ids for row in rows])
    return TokenBatch(
        starts=np.cumsum([0, *(len(row.token_ids) for row in rows)], dtype=np.int64),
        token_ids=token_ids,
        policy_mask=np.concatenate(masks),
        temperatures=np.ones(len(token_ids), np.float32),
        kept_sets=None,
    )


def rows_digest(rows: Sequence[SftRow]) -> str:
    """Return a digest of tokens and targets, in order, by which a continued run knows its rows."""
    digest = hashlib.blake2b(digest_size=16)
    for row in rows:
        digest.update(len(row.token_ids).to_bytes(8, "little"))
        digest.update(row.token_ids.astype("<i4").tobytes())
        digest.update(row.loss_mask.tobytes())
    return digest.hexdigest()
