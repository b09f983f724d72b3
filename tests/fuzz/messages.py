"""Random protobuf messages at the boundaries of their types, and damaged bytes."""

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

INTEGERS = (0, 1, -1, 2, 4, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63))
_FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf)
_TEXT_LENGTHS, _LONG_TEXT = (0, 1, 8, 8, 8, 40, 600), 100_000
_LIST_LENGTHS, _LONG_LIST = (0, 1, 1, 2, 3), 1_000
_LONG_SHARE = 0.01
_CHARACTERS = "a0 ,:/%{}[]\"'\\\n\0\x7f<>é中\U0001f600"
_MOST_DEPTH = 5
_TYPES = FieldDescriptor
_BITS = {_TYPES.CPPTYPE_INT32: 32, _TYPES.CPPTYPE_UINT32: 32, _TYPES.CPPTYPE_ENUM: 32}
_UNSIGNED = (_TYPES.CPPTYPE_UINT32, _TYPES.CPPTYPE_UINT64)


def corrupted(rng: random.Random, data: bytes) -> bytes:
    """Return the bytes cut off, overwritten in places, or replaced."""
    way = rng.randrange(3)
    if way == 0 or not data:
        return rng.randbytes(rng.choice((1, 3, 40, 5_000)))
    if way == 1:
        return data[: rng.randrange(len(data))]
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        changed[rng.randrange(len(changed))] = rng.randrange(256)
    return bytes(changed)


@dataclass(frozen=True, slots=True)
class Values:
    """Source of values; a field in ``known`` gets one of its valid values, except for a share of ``absurd``."""

    rng: random.Random
    known: Mapping[str, Sequence[Any]]
    absurd: float

    def message(self, kind: type[M]) -> M:
        """Return a message of random fields."""
        made = kind()
        self._fill(made, 0)
        return made

    def text(self) -> str:
        """Return text of a boundary length."""
        return self.rng.choice(_CHARACTERS) * self._length(_TEXT_LENGTHS, _LONG_TEXT)

    def _length(self, usual: Sequence[int], long: int) -> int:
        return long if self.rng.random() < _LONG_SHARE else self.rng.choice(usual)

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if depth >= _MOST_DEPTH or self.rng.random() < 0.3 * self.absurd:
                continue
            target = getattr(message, field.name)
            if not field.is_repeated:
                if field.message_type is not None:
                    target.SetInParent()
                    self._fill(target, depth + 1)
                else:
                    setattr(message, field.name, self._scalar(field))
            elif field.message_type is not None and field.message_type.GetOptions().map_entry:
                self._fill_map(target, field.message_type.fields_by_name, depth)
            else:
                for _ in range(self._length(_LIST_LENGTHS, _LONG_LIST) if depth == 0 else self.rng.randrange(3)):
                    if field.message_type is None:
                        target.append(self._scalar(field))
                    else:
                        self._fill(target.add(), depth + 1)

    def _fill_map(self, target: Any, entry: Mapping[str, Any], depth: int) -> None:
        for _ in range(self.rng.choice(_LIST_LENGTHS)):
            key = self._scalar(entry["key"])
            if entry["value"].message_type is None:
                target[key] = self._scalar(entry["value"])
            else:
                self._fill(target[key], depth + 1)

    def _scalar(self, field: Any) -> Any:
        known = self.known.get(field.name)
        if known and self.rng.random() >= self.absurd:
            return self.rng.choice(known)
        kind = field.cpp_type
        if kind in (_TYPES.CPPTYPE_DOUBLE, _TYPES.CPPTYPE_FLOAT):
            return self.rng.choice(_FLOATS)
        if kind == _TYPES.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == _TYPES.CPPTYPE_STRING:
            is_bytes = field.type == _TYPES.TYPE_BYTES
            return self.rng.randbytes(self._length(_TEXT_LENGTHS, _LONG_TEXT)) if is_bytes else self.text()
        bits, unsigned = _BITS.get(kind, 64), kind in _UNSIGNED
        least, most = (0, 2**bits - 1) if unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
        return max(least, min(most, self.rng.choice(INTEGERS)))
