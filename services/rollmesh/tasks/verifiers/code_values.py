"""Decoder of the plain values that ``code_runner`` reports for ``assert`` tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from decimal import Decimal
from fractions import Fraction
from typing import Any

_READERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda items: tuple(map(read_value, items)),
    "set": lambda items: set(map(read_value, items)),
    "frozenset": lambda items: frozenset(map(read_value, items)),
    "dict": lambda pairs: {read_value(key): read_value(value) for key, value in pairs},
    "iterator": lambda items: iter([read_value(item) for item in items]),
    "range": lambda bounds: range(*bounds),
    "bytes": bytes.fromhex,
    "complex": lambda parts: complex(*parts),
    "Decimal": Decimal,
    "Fraction": Fraction,
    "other": lambda _: object(),
}


def read_value(encoded: Any) -> Any:
    """Return the value of one report; an object of another type becomes an object that equals no other.

    Raises any Exception for a report that the runner would not write.
    """
    if isinstance(encoded, list):
        return [read_value(item) for item in encoded]
    if isinstance(encoded, dict):
        ((kind, content),) = encoded.items()
        return _READERS[kind](content)
    return encoded
