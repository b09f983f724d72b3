"""Conversion of trajectories to the messages of RewardService, and of these to the input of a verifier."""

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


def score_items(request: bytes) -> list[bytes]:
    """Split a ScoreRequest into encoded items; raises DataError if it is malformed."""
    try:
        return list(pb.EncodedScoreRequest.FromString(request).items)
    except DecodeError as error:
        raise DataError(f"score request: {error}") from error


def score_item_head(item: bytes) -> ScoreItemHead:
    """Read the head of one encoded item; raises DataError if it is malformed."""
    try:
        head = pb.ScoreItemHead.FromString(item)
    except DecodeError as error:
        raise DataError(f"score item: {error}") from error
    return ScoreItemHead(trajectory_id=head.trajectory_id, verifier=head.prompt.verifier, traceparent=head.traceparent)


def outcome_to_bytes(outcome: RewardOutcome) -> bytes:
    """Encode an outcome."""
    return outcome_to_pb(outcome).SerializeToString()


def outcome_from_bytes(data: bytes) -> RewardOutcome:
    """Decode an outcome; raises DataError if the bytes are malformed."""
    try:
        return outcome_from_pb(trajectory_pb2.RewardOutcome.FromString(data))
    except DecodeError as error:
        raise DataError(f"outcome: {error}") from error
