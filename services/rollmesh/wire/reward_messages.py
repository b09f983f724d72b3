"""Conversion of trajectories to the messages of RewardService, and of these to the input of a verifier."""

from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import DecodeError

from rollmesh.errors import DataError
from rollmesh.types import FinishReason, Int32Array, Prompt, RewardOutcome, Trajectory
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import trajectory_pb2
from rollmesh.wire.codec import (
    finish_from_pb,
    finish_to_pb,
    ids_from_pb,
    outcome_from_pb,
    outcome_to_pb,
    prompt_from_pb,
    prompt_to_pb,
    tensor_to_pb,
)

_ITEMS = pb.ScoreRequest.ITEMS_FIELD_NUMBER
_TRAJECTORY_ID = pb.ScoreItem.TRAJECTORY_ID_FIELD_NUMBER
_PROMPT = pb.ScoreItem.PROMPT_FIELD_NUMBER
_TRACEPARENT = pb.ScoreItem.TRACEPARENT_FIELD_NUMBER
_VERIFIER = trajectory_pb2.Prompt.VERIFIER_FIELD_NUMBER
_MOST_FIELDS = 64
"""Maximum number of fields of one item and of one prompt; this module's encoder writes each field once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItem:
    """One answer to score."""

    trajectory_id: str
    prompt: Prompt
    response_ids: Int32Array  # [tokens]
    finish_reason: FinishReason | None


def score_item_to_pb(trajectory: Trajectory) -> pb.ScoreItem:
    """Encode the parts of a finished trajectory that a reward service needs."""
    return pb.ScoreItem(
        trajectory_id=trajectory.trajectory_id,
        prompt=prompt_to_pb(trajectory.prompt),
        response_ids=tensor_to_pb(trajectory.response_ids),
        finish_reason=finish_to_pb(trajectory.finish_reason),
        traceparent=trajectory.traceparent,
    )


def score_item_from_bytes(data: bytes) -> ScoreItem:
    """Decode one item; DataError names the invalid field."""
    try:
        message = pb.ScoreItem.FromString(data)
    except DecodeError as error:
        raise DataError(f"score item: {error}") from error
    return ScoreItem(
        trajectory_id=message.trajectory_id,
        prompt=prompt_from_pb(message.prompt),
        response_ids=ids_from_pb(message.response_ids, "response_ids"),
        finish_reason=finish_from_pb(message.finish_reason),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreItemHead:
    """Fields of an encoded item that the reward service reads to route and trace it."""

    trajectory_id: str
    verifier: str
    traceparent: str


def score_items(request: bytes, most: int) -> list[bytes]:
    """Split a ScoreRequest into encoded items; raises DataError if it is malformed or has more than ``most`` fields."""
    return [content for number, content in bytes_fields(request, most) if number == _ITEMS]


def score_item_head(item: bytes) -> ScoreItemHead:
    """Read the head of one encoded item; raises DataError if it is malformed."""
    found = {_TRAJECTORY_ID: b"", _TRACEPARENT: b""}
    verifier = b""
    for number, content in bytes_fields(item, _MOST_FIELDS):
        found[number] = content
        if number == _PROMPT:
            verifier = dict(bytes_fields(content, _MOST_FIELDS)).get(_VERIFIER, verifier)
    try:
        return ScoreItemHead(
            trajectory_id=found[_TRAJECTORY_ID].decode(),
            verifier=verifier.decode(),
            traceparent=found[_TRACEPARENT].decode(),
        )
    except UnicodeDecodeError as error:
        raise DataError(f"score item: {error}") from error


def outcome_to_bytes(outcome: RewardOutcome) -> bytes:
    """Encode an outcome."""
    return outcome_to_pb(outcome).SerializeToString()


def outcome_from_bytes(data: bytes) -> RewardOutcome:
    """Decode an outcome; raises DataError if the bytes are malformed."""
    try:
        return outcome_from_pb(trajectory_pb2.RewardOutcome.FromString(data))
    except DecodeError as error:
        raise DataError(f"outcome: {error}") from error


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
