"""reasoning-gym entries as JSON text. Tuples, sets and non-text keys are kept, because some tasks score by them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rollmesh.errors import DataError

_TAG = "$type"


def entry_to_text(entry: Mapping[str, Any]) -> str:
    """Encode one entry. Raises DataError with the type of a value that has no JSON form."""
    return json.dumps(_plain(entry), ensure_ascii=False)


def entry_from_text(text: str) -> dict[str, Any]:
    """Decode one entry. Raises DataError if the text is not an encoded entry."""
    try:
        value = _rich(json.loads(text))
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"not an encoded entry: {error}") from error
    if not isinstance(value, dict):
        raise DataError(f"not an encoded entry: {type(value).__name__}")
    return value


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, tuple):
        return {_TAG: "tuple", "items": [_plain(item) for item in value]}
    if isinstance(value, set | frozenset):
        return {_TAG: "set", "items": sorted((_plain(item) for item in value), key=repr)}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) and key != _TAG for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_TAG: "dict", "items": [[_plain(key), _plain(item)] for key, item in value.items()]}
    if hasattr(value, "item"):  # numpy scalars
        return _plain(value.item())
    raise DataError(f"reasoning-gym entry: a value of type {type(value).__name__} has no JSON form")


def _rich(value: Any) -> Any:
    if isinstance(value, list):
        return [_rich(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get(_TAG):
        case None:
            return {key: _rich(item) for key, item in value.items()}
        case "tuple":
            return tuple(_rich(item) for item in value["items"])
        case "set":
            return {_rich(item) for item in value["items"]}
        case "dict":
            return {_rich(key): _rich(item) for key, item in value["items"]}
        case other:
            raise ValueError(f"unknown tag {other!r}")
