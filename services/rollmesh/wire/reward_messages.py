"""Trajectories to the messages of RewardService, and back to what a verifier is given."""

from __future__ import annotations

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
    """What a reward service needs of a finished trajectory."""
    return pb.ScoreItem(
        trajectory_id=trajectory.trajectory_id,
        prompt=prompt_to_pb(trajectory.prompt),
        response_ids=tensor_to_pb(trajectory.response_ids),
        finish_reason=finish_to_pb(trajectory.finish_reason),
        traceparent=trajectory.traceparent,
    )


def score_item_from_bytes(data: bytes) -> ScoreItem:
    """Decode one item; raises DataError naming the field that is wrong."""
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


def outcome_to_bytes(outcome: RewardOutcome) -> bytes:
    """Encode an outcome."""
    return outcome_to_pb(outcome).SerializeToString()


def outcome_from_bytes(data: bytes) -> RewardOutcome:
    """Decode an outcome; raises DataError when the bytes are none."""
    try:
        return outcome_from_pb(trajectory_pb2.RewardOutcome.FromString(data))
    except DecodeError as error:
        raise DataError(f"outcome: {error}") from error
