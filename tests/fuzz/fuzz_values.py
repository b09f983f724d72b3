"""Random values at the boundaries of their types: protobuf messages by descriptor, JSON by OpenAPI schema."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

M = TypeVar("M", bound=Message)

INTEGERS = (0, 1, -1, 2, 4, 255, 2**31 - 1, 2**31, -(2**31), 2**53, 2**62, 2**63 - 1, -(2**63))
FLOATS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e300, math.nan, math.inf, -math.inf)
TEXT_LENGTHS = (0, 1, 8, 8, 8, 40, 600)
LIST_LENGTHS = (0, 1, 1, 2, 3)
LONG_TEXT = 100_000
LONG_LIST = 1_000
_LONG_SHARE = 0.01
_CHARACTERS = "a0 ,:/%{}[]\"'\\\n\0\x7f<>é中\U0001f600"
_MOST_DEPTH = 5
_TYPES = FieldDescriptor
_BITS = {_TYPES.CPPTYPE_INT32: 32, _TYPES.CPPTYPE_UINT32: 32, _TYPES.CPPTYPE_ENUM: 32}
_UNSIGNED = (_TYPES.CPPTYPE_UINT32, _TYPES.CPPTYPE_UINT64)
_JSON: tuple[Any, ...] = (None, True, False, "", "x", {}, [], [[]], {"a": {"b": []}}, *INTEGERS, *FLOATS, 10**400)


@dataclass(frozen=True, slots=True)
class Values:
    """Source of values; a field in ``known`` gets one of its valid values, except for a share of ``absurd``."""

    rng: random.Random
    known: Mapping[str, Sequence[Any]]
    absurd: float

    def text(self) -> str:
        """Return text of a boundary length."""
        return self.rng.choice(_CHARACTERS) * self._length(TEXT_LENGTHS, LONG_TEXT)

    def _length(self, usual: Sequence[int], long: int) -> int:
        return long if self.rng.random() < _LONG_SHARE else self.rng.choice(usual)

    def message(self, kind: type[M]) -> M:
        """Return a message of random fields."""
        made = kind()
        self._fill(made, 0)
        return made

    def _fill(self, message: Message, depth: int) -> None:
        for field in message.DESCRIPTOR.fields:
            if depth >= _MOST_DEPTH or self.rng.random() < 0.3 * self.absurd:
                continue
            target = getattr(message, field.name)
            entry = field.message_type.fields_by_name if field.message_type is not None else {}
            if not field.is_repeated:
                if field.message_type is not None:
                    target.SetInParent()
                    self._fill(target, depth + 1)
                else:
                    setattr(message, field.name, self._scalar(field))
            elif field.message_type is not None and field.message_type.GetOptions().map_entry:
                for _ in range(self.rng.choice(LIST_LENGTHS)):
                    key = self._scalar(entry["key"])
                    if entry["value"].message_type is None:
                        target[key] = self._scalar(entry["value"])
                    else:
                        self._fill(target[key], depth + 1)
            else:
                for _ in range(self._length(LIST_LENGTHS, LONG_LIST) if depth == 0 else self.rng.randrange(3)):
                    if field.message_type is None:
                        target.append(self._scalar(field))
                    else:
                        self._fill(target.add(), depth + 1)

    def _scalar(self, field: Any) -> Any:
        known = self.known.get(field.name)
        if known and self.rng.random() >= self.absurd:
            return self.rng.choice(known)
        kind = field.cpp_type
        if kind in (_TYPES.CPPTYPE_DOUBLE, _TYPES.CPPTYPE_FLOAT):
            return self.rng.choice(FLOATS)
        if kind == _TYPES.CPPTYPE_BOOL:
            return self.rng.random() < 0.5
        if kind == _TYPES.CPPTYPE_STRING:
            if field.type == _TYPES.TYPE_BYTES:
                return self.rng.randbytes(self._length(TEXT_LENGTHS, LONG_TEXT))
            return self.text()
        least = 0 if kind in _UNSIGNED else -(2 ** (_BITS.get(kind, 64) - 1))
        most = 2 ** (_BITS.get(kind, 64) - (kind not in _UNSIGNED)) - 1
        return max(least, min(most, self.rng.choice(INTEGERS)))

    def corrupted(self, data: bytes) -> bytes:
        """Return the bytes cut off, overwritten in places, or replaced."""
        way = self.rng.randrange(3)
        if way == 0 or not data:
            return self.rng.randbytes(self.rng.choice((1, 3, 40, 5_000)))
        if way == 1:
            return data[: self.rng.randrange(len(data))]
        changed = bytearray(data)
        for _ in range(self.rng.randint(1, 8)):
            changed[self.rng.randrange(len(changed))] = self.rng.randrange(256)
        return bytes(changed)

    def json(self, schema: Mapping[str, Any], document: Mapping[str, Any], name: str = "", depth: int = 0) -> Any:
        """Return a value for a schema of an OpenAPI document; a share of ``absurd`` of the values has any type."""
        if "$ref" in schema:
            schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
        if self.rng.random() < self.absurd * 0.5 or depth > _MOST_DEPTH:
            return self.text() if self.rng.random() < 0.3 else self.rng.choice(_JSON)
        if name in self.known and self.rng.random() >= self.absurd:
            return self.rng.choice(self.known[name])
        if choices := schema.get("anyOf") or schema.get("oneOf") or schema.get("allOf"):
            return self.json(self.rng.choice(choices), document, name, depth)
        if values := schema.get("enum"):
            return self.rng.choice(values)
        if "const" in schema:
            return schema["const"]
        return self._of_type(schema, document, depth)

    def _of_type(self, schema: Mapping[str, Any], document: Mapping[str, Any], depth: int) -> Any:
        kind, rng = schema.get("type"), self.rng
        if kind == "object":
            required = schema.get("required", ())
            fields = schema.get("properties", {}).items()
            kept = {n: s for n, s in fields if n in required or rng.random() < 0.3}
            return {n: self.json(s, document, n, depth + 1) for n, s in kept.items()}
        if kind == "array":
            items = schema.get("items", {})
            return [self.json(items, document, "", depth + 1) for _ in range(rng.randrange(4))]
        if kind == "integer":
            return rng.choice(INTEGERS)
        if kind == "number":
            return rng.choice(FLOATS)
        if kind == "boolean":
            return rng.random() < 0.5
        return self.text() if kind == "string" else rng.choice(_JSON)

    def body(self, schema: Mapping[str, Any], document: Mapping[str, Any]) -> bytes:
        """Return a JSON body for a schema; some bodies are corrupt, deeply nested or long."""
        way = self.rng.random()
        if way < 0.01:
            return b'{"a":' * 50_000
        if way < 0.02:
            return b"[" * self.rng.choice((600, 1_000_000))
        if way < 0.022:
            return b'"' + b"x" * self.rng.choice((1 << 20, 12 << 20)) + b'"'
        data = json.dumps(self.json(schema, document)).encode()
        return self.corrupted(data) if way < 0.15 else data
