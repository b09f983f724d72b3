"""Prompts of rows: one prompt of each row, with an error for an invalid one; order, epochs and rows held out."""

import hashlib
import json
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from rollmesh.characters import half_character
from rollmesh.config.data import DOMAIN_PATTERN
from rollmesh.errors import DataError
from rollmesh.tasks.sources.source_protocol import SourceRows, SourceSettings
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, short_repr
from rollmesh.types import Int32Array, Prompt

MESSAGES = "_messages"
"""Metadata key of the chat messages of a prompt, if they are kept."""
_DOMAIN = re.compile(DOMAIN_PATTERN)
_ROWS_PER_REPORT = 1024
_SPARE_TOKENS = 16


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

    def row(self, number: int) -> "Row":
        """Return row ``number``, counted from 0. Raises DataError if it cannot be read."""

    def prompt_id(self, number: int) -> str:
        """Return the id of the prompt of a row, without reading the row."""


class RowPrompts(FinitePrompts):
    """Prompt source over rows; every row is checked once, when the source is opened.

    Rows whose prompts are equal are held out together, so an evaluation prompt is never trained on.
    """

    def __init__(self, reader: RowReader, form: "RowFormat", settings: SourceSettings) -> None:
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
            content = json.dumps(row.required(self._form.prompt_field), sort_keys=True, default=str).encode()
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """Meaning of the fields of a row."""

    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    verifier_field: str | None = None
    required: bool = True
    """False if a row may lack its answer and its verifier."""
    chat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and its position for messages (``where``), for example ``train.jsonl:17``."""

    fields: Mapping[str, Any]
    where: str
    prompt_id: str

    def required(self, field: str) -> Any:
        """Return the value of a field, or of ``outer.inner``. Raises DataError if it is missing or null."""
        value, at = self.fields, ""
        for name in [field] if field in self.fields else field.split("."):
            if not isinstance(value, Mapping) or name not in value:
                names = ", ".join(map(str, value)) if isinstance(value, Mapping) else short_repr(value)
                raise DataError(f"{self.where}: field {field!r} is missing; {at or 'the row'} has {names or 'nothing'}")
            value, at = value[name], f"{at}.{name}".strip(".")
        if value is None:
            raise DataError(f"{self.where}: field {field!r} is null")
        return value


def prompt_from_row(row: Row, form: RowFormat, settings: SourceSettings) -> Prompt:
    """Build the prompt. Raises DataError with the row and the field."""
    value, where = row.required(form.prompt_field), f"{row.where}: field {form.prompt_field!r}"
    try:
        messages = _chat(value, form)
        token_ids = _token_ids(value, messages, settings)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    metadata = _metadata(row, form)
    if settings.keep_messages and messages is not None:
        metadata[MESSAGES] = [_json_value(message, where) for message in messages]
    return Prompt(
        prompt_id=row.prompt_id,
        token_ids=token_ids,
        verifier=_verifier(row, form),
        metadata=metadata,
        domain=domain_of_row(row, settings.domain_field),
    )


def domain_of_row(row: Row, domain_field: str | None) -> str:
    """Return the domain of a row; empty without domains. Raises DataError with the row if it names none."""
    if domain_field is None:
        return ""
    domain = row.required(domain_field)
    if not isinstance(domain, str) or not _DOMAIN.fullmatch(domain):
        raise DataError(
            f"{row.where}: field {domain_field!r} (data.domain_field): expected a name of at most 64 letters, digits, "
            f"'_', '.', '+' and '-', got {short_repr(domain)}"
        )
    return domain


def check_row(row: Row, form: RowFormat, settings: SourceSettings) -> None:
    """Raise DataError for a row that ``prompt_from_row`` would reject.

    Short plain prompts are not tokenised: a tokenizer writes at most about one token per byte, so they must fit.
    """
    value = row.required(form.prompt_field)
    is_plain = isinstance(value, str) and not form.chat and value.strip() and not half_character(value)
    if is_plain and len(value.encode()) + _SPARE_TOKENS <= settings.max_prompt_tokens:
        _verifier(row, form)
        _metadata(row, form)
    else:
        prompt_from_row(row, form, settings)


def _token_ids(value: Any, messages: list[Mapping[str, Any]] | None, settings: SourceSettings) -> Int32Array:
    tokenizer = settings.tokenizer
    if isinstance(value, str) and not value.strip():
        raise DataError("the prompt is empty")
    if messages is not None:
        found = tokenizer.render_chat(messages, variables=settings.template_variables)
    elif isinstance(value, str):
        found = tokenizer.encode(value, special_tokens=True)
    elif isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
        tokenizer.check_range(np.array(value, object))
        found = np.array(value, np.int32)
    else:
        raise DataError(f"expected text, chat messages or token ids, got {short_repr(value)}")
    if len(found) == 0:
        raise DataError("the prompt has no tokens")
    if len(found) > settings.max_prompt_tokens:
        raise DataError(
            f"the prompt has {len(found)} tokens, more than data.max_prompt_tokens={settings.max_prompt_tokens}; raise "
            "it or drop the row"
        )
    return found


def _chat(value: Any, form: RowFormat) -> list[Mapping[str, Any]] | None:
    """Return the messages of a prompt that is rendered as a chat; None for other prompts."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if form.chat else None
    messages = chat_messages(value)
    if messages is not None and not any(message["content"].strip() for message in messages):
        raise DataError("the prompt is empty")
    return messages


def chat_messages(value: Any) -> list[Mapping[str, Any]] | None:
    """Return messages without fields that are null; None for what is no list of objects. Raises DataError."""
    if not (isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value)):
        return None
    # The columns of a table give every message all fields: those that it does not have are null.
    messages = [without_nulls(message) for message in value]
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise DataError(f"message {number}: tool_calls must be a list of objects, got {short_repr(calls)}")
        if calls:
            message.setdefault("content", "")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(f"message {number} needs role and content as text, got {short_repr(message)}")
    return list(messages)


def without_nulls(value: Any) -> Any:
    """Return a value without the fields of its objects that are null."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def _verifier(row: Row, form: RowFormat) -> str:
    if form.verifier_field is None or (not form.required and form.verifier_field not in row.fields):
        return ""
    name = row.required(form.verifier_field)
    # A dataset may choose a built-in verifier, but may not name code to run.
    if name not in BUILT_IN:
        raise DataError(
            f"{row.where}: field {form.verifier_field!r}: unknown verifier {short_repr(name)}; "
            f"a row can name {', '.join(sorted(BUILT_IN))}"
        )
    return str(name)


def _metadata(row: Row, form: RowFormat) -> dict[str, Any]:
    used = {form.prompt_field, form.verifier_field}
    metadata = {
        _text(name, f"{row.where}: field {name!r}: its name"): _json_value(value, f"{row.where}: field {name!r}")
        for name, value in row.fields.items()
        if name not in used
    }
    if form.answer_field is not None and (form.required or form.answer_field in row.fields):
        answer = _json_value(row.required(form.answer_field), f"{row.where}: field {form.answer_field!r}")
        metadata.pop(form.answer_field, None)
        metadata["answer"] = answer
    return metadata


def _text(value: str, where: str) -> str:
    if problem := half_character(value):
        raise DataError(f"{where}: {problem}; correct or drop it")
    return value


def _json_value(value: Any, where: str) -> Any:
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise DataError(f"{where}: {value} is not a finite number")
        return value
    if isinstance(value, list | tuple):
        return [_json_value(item, f"{where}[{at}]") for at, item in enumerate(value)]
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise DataError(f"{where}: keys must be text, got {short_repr(list(value))}")
        return {_text(key, f"{where}: a key"): _json_value(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, Decimal):
        return f"{value:f}"
    if isinstance(value, date | time):
        return str(value)
    raise DataError(f"{where}: {type(value).__name__} is not a JSON value; convert or drop the field")
