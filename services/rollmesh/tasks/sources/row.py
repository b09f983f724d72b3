"""Conversion of one dataset row to one prompt, with an error for every invalid row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, time
from decimal import Decimal
from typing import Any

import numpy as np

from rollmesh.characters import half_character
from rollmesh.config.data import DOMAIN_PATTERN
from rollmesh.errors import DataError
from rollmesh.tasks.sources.source_protocol import SourceSettings
from rollmesh.tasks.verifiers.verifier_protocol import BUILT_IN, short_repr
from rollmesh.text import Tokenizer
from rollmesh.types import Int32Array, Prompt

MESSAGES = "_messages"
"""Metadata key of the chat messages of a prompt, if they are kept."""

_DOMAIN = re.compile(DOMAIN_PATTERN)

LARGEST_EXACT_INTEGER = 2**53
"""Largest integer in metadata, which is sent as JSON numbers; larger integers would be rounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFormat:
    """Meaning of the fields of a row."""

    prompt_field: str = "prompt"
    answer_field: str | None = "answer"
    answer_required: bool = True
    verifier_field: str | None = None
    verifier_required: bool = True
    chat: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One row and its position for messages (``where``), for example ``train.jsonl:17``."""

    fields: Mapping[str, Any]
    where: str
    prompt_id: str


def prompt_from_row(row: Row, form: RowFormat, settings: SourceSettings) -> Prompt:
    """Build the prompt. Raises DataError with the row and the field."""
    token_ids = _token_ids(row, form, settings)
    if len(token_ids) == 0:
        raise DataError(f"{row.where}: field {form.prompt_field!r}: the prompt has no tokens")
    if len(token_ids) > settings.max_prompt_tokens:
        raise DataError(
            f"{row.where}: field {form.prompt_field!r}: the prompt has {len(token_ids)} tokens, more than "
            f"data.max_prompt_tokens={settings.max_prompt_tokens}; raise it or drop the row"
        )
    metadata = _metadata(row, form)
    if settings.keep_messages and (messages := _chat(prompt_value(row, form), form)) is not None:
        metadata[MESSAGES] = [_json_value(m, f"{row.where}: field {form.prompt_field!r}") for m in messages]
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
    domain = _required(row, domain_field)
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
    value = prompt_value(row, form)
    if isinstance(value, str) and not form.chat and value.strip() and not half_character(value):
        slack = 16
        if len(value.encode()) + slack <= settings.max_prompt_tokens:
            _verifier(row, form)
            _metadata(row, form)
            return
    prompt_from_row(row, form, settings)


def prompt_value(row: Row, form: RowFormat) -> Any:
    """Return the raw prompt field."""
    return _required(row, form.prompt_field)


def _token_ids(row: Row, form: RowFormat, settings: SourceSettings) -> Int32Array:
    value, tokenizer = prompt_value(row, form), settings.tokenizer
    where = f"{row.where}: field {form.prompt_field!r}"
    try:
        if isinstance(value, str) and not value.strip():
            raise DataError("the prompt is empty")
        if (messages := _chat(value, form)) is not None:
            return tokenizer.render_chat(messages, variables=settings.template_variables)
        if isinstance(value, str):
            return tokenizer.encode(value, special_tokens=True)
        if isinstance(value, list) and all(isinstance(i, int) and not isinstance(i, bool) for i in value):
            return _given_ids(value, tokenizer)
    except DataError as error:
        raise DataError(f"{where}: {error}") from error
    raise DataError(f"{where}: expected text, chat messages or token ids, got {short_repr(value)}")


def _chat(value: Any, form: RowFormat) -> list[Mapping[str, Any]] | None:
    """Return the messages of a prompt that is rendered as a chat; None for other prompts."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}] if form.chat else None
    if isinstance(value, list) and value and all(isinstance(m, Mapping) for m in value):
        return _messages(value)
    return None


def _messages(value: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    # The columns of a table give every message all fields: those that it does not have are null.
    messages = [_without_nulls(message) for message in value]
    for number, message in enumerate(messages):
        calls = message.get("tool_calls")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(call, Mapping) for call in calls)):
            raise DataError(f"message {number}: tool_calls must be a list of objects, got {short_repr(calls)}")
        if calls:
            message.setdefault("content", "")
        if not isinstance(message.get("role"), str) or not isinstance(message.get("content"), str):
            raise DataError(f"message {number} needs role and content as text, got {short_repr(message)}")
    if not any(message["content"].strip() for message in messages):
        raise DataError("the prompt is empty")
    return list(messages)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _given_ids(value: list[int], tokenizer: Tokenizer) -> Int32Array:
    for at, token in enumerate(value):
        if not 0 <= token < tokenizer.vocab_size:
            raise DataError(f"token_ids[{at}]: id {token} is outside the vocabulary [0, {tokenizer.vocab_size})")
    return np.array(value, np.int32)


def _verifier(row: Row, form: RowFormat) -> str:
    if form.verifier_field is None or (not form.verifier_required and form.verifier_field not in row.fields):
        return ""
    name = _required(row, form.verifier_field)
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
    if form.answer_field is not None and (form.answer_required or form.answer_field in row.fields):
        answer = _json_value(_required(row, form.answer_field), f"{row.where}: field {form.answer_field!r}")
        metadata.pop(form.answer_field, None)
        metadata["answer"] = answer
    return metadata


def _required(row: Row, field: str) -> Any:
    value, at = row.fields, ""
    for name in [field] if field in row.fields else field.split("."):
        if not isinstance(value, Mapping) or name not in value:
            names = ", ".join(map(str, value)) if isinstance(value, Mapping) else short_repr(value)
            raise DataError(f"{row.where}: field {field!r} is missing; {at or 'the row'} has {names or 'nothing'}")
        value, at = value[name], f"{at}.{name}".strip(".")
    if value is None:
        raise DataError(f"{row.where}: field {field!r} is null")
    return value


def _text(value: str, where: str) -> str:
    if problem := half_character(value):
        raise DataError(f"{where}: {problem}; correct or drop it")
    return value


def _json_value(value: Any, where: str) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return _text(value, where)
    if isinstance(value, int):
        if abs(value) > LARGEST_EXACT_INTEGER:
            raise DataError(f"{where}: {value} is beyond 2**53 and would be rounded; write it as text")
        return value
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
