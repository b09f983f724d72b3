"""A batch as bytes: one length-prefixed protobuf message per group, to stay below protobuf's limit of 2 GB."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from google.protobuf.message import DecodeError

from rollmesh.errors import DataError
from rollmesh.types import Batch, Group
from rollmesh.v1 import trajectory_pb2 as pb
from rollmesh.wire.codec import batch_from_pb, batch_to_pb

_LENGTH = struct.Struct("<Q")


def encode_groups(batch: Batch) -> Iterator[bytes]:
    """Encode a batch as frames. Equal batches give equal bytes (map fields are ordered)."""
    for group in batch.groups:
        message = batch_to_pb(Batch(train_step=batch.train_step, groups=(group,)))
        data = message.SerializeToString(deterministic=True)
        yield _LENGTH.pack(len(data)) + data


def decode_groups(data: bytes) -> Iterator[Group]:
    """Decode the groups of concatenated frames. Raises DataError with the byte offset of a malformed frame."""
    view = memoryview(data)
    position = 0
    while position < len(view):
        start = position
        try:
            (length,) = _LENGTH.unpack_from(view, position)
            position += _LENGTH.size + length
            if position > len(view):
                raise DataError(f"{position - len(view)} bytes are missing")
            message = pb.Batch.FromString(bytes(view[position - length : position]))
            yield from batch_from_pb(message).groups
        except (struct.error, DecodeError, DataError) as error:
            raise DataError(f"malformed group at byte {start}: {error}") from error


def batch_to_bytes(batch: Batch) -> bytes:
    """Encode a batch as one byte string, for a broadcast within the trainer."""
    return b"".join(encode_groups(batch))


def batch_from_bytes(train_step: int, data: bytes) -> Batch:
    """Decode the result of ``batch_to_bytes``. Raises DataError."""
    groups: Iterable[Group] = decode_groups(data)
    return Batch(train_step=train_step, groups=tuple(groups))
