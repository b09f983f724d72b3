"""Reader of single fields of an encoded protobuf message, without decoding the message.

A decoded message can be forty times larger than its bytes: two bytes decode to an empty message of 80 bytes. A service
that only forwards messages avoids this cost.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.errors import DataError

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_LONGEST_VARINT_BYTES = 10


def bytes_fields(data: bytes, most: int) -> Iterator[tuple[int, bytes]]:
    """Yield number and content of each length-delimited field, in order; other fields are skipped.

    Raises DataError for malformed bytes, or for a message of more than ``most`` fields of any type.
    """
    at = count = 0
    while at < len(data):
        count += 1
        if count > most:
            raise DataError(f"more than {most} fields in a message of {len(data)} bytes")
        tag, at = _varint(data, at)
        kind, size = tag & 7, 0
        if kind == _VARINT:
            _, at = _varint(data, at)
        elif kind == _BYTES:
            size, at = _varint(data, at)
        elif kind in (_FIXED_32, _FIXED_64):
            size = 4 if kind == _FIXED_32 else 8
        else:
            raise DataError(f"byte {at}: wire type {kind} is unknown")
        if at + size > len(data):
            raise DataError(f"byte {at}: a field of {size} bytes ends after the message of {len(data)}")
        if kind == _BYTES:
            yield tag >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Read the number at ``at``; return it and the position after it."""
    value = 0
    for length, byte in enumerate(data[at : at + _LONGEST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            return value, at + length + 1
    raise DataError(f"byte {at}: a number does not end")
