"""Read single fields of an encoded protobuf message without decoding it.

A decoded message can be forty times as large as its bytes: two bytes are an empty message of 80. Whoever only passes
messages on does not pay that.
"""

from __future__ import annotations

from collections.abc import Iterator

from rollmesh.errors import DataError

_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_LONGEST_VARINT_BYTES = 10


def bytes_fields(data: bytes, most: int) -> Iterator[tuple[int, bytes]]:
    """Number and content of each length-delimited field, in order; other fields are passed over.

    Raises DataError for bytes that are no message, or one of more than ``most`` fields of any kind.
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
    """The number at ``at``, and where it ends."""
    value = 0
    for length, byte in enumerate(data[at : at + _LONGEST_VARINT_BYTES]):
        value |= (byte & 0x7F) << (7 * length)
        if byte < 0x80:
            return value, at + length + 1
    raise DataError(f"byte {at}: a number does not end")
