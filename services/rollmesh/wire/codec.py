"""Conversion between dataclasses and protobuf; arrays are little-endian bytes with a dtype tag.

Packed protobuf lists are about a hundred times slower than ``np.frombuffer`` on raw bytes, so tokens are never
converted to lists here.
"""

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from rollmesh.errors import DataError
from rollmesh.kept_sets import check_sets, pack_sets, unpack_sets
from rollmesh.types import (
    Batch,
    FinishReason,
    Float32Array,
    Group,
    Int32Array,
    KeptSets,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    SamplingParams,
    Segment,
    SegmentSource,
    TeacherColumn,
    Trajectory,
    TurnReturn,
)
from rollmesh.v1 import trajectory_pb2 as pb

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_DTYPES: dict[int, np.dtype[Any]] = {pb.DTYPE_INT32: _INT32, pb.DTYPE_FLOAT32: _FLOAT32}

_FINISH: dict[FinishReason, Any] = {r: pb.FinishReason.Value(f"FINISH_REASON_{r.name}") for r in FinishReason}
_FINISH_BACK: dict[Any, FinishReason] = {v: k for k, v in _FINISH.items()}
_OUTCOME: dict[OutcomeKind, Any] = {k: pb.OutcomeKind.Value(f"OUTCOME_KIND_{k.name}") for k in OutcomeKind}
_OUTCOME_BACK: dict[Any, OutcomeKind] = {v: k for k, v in _OUTCOME.items()}
_SOURCE: dict[SegmentSource, Any] = {s: pb.SegmentSource.Value(f"SEGMENT_SOURCE_{s.name}") for s in SegmentSource}
_SOURCE_BACK: dict[Any, SegmentSource] = {v: k for k, v in _SOURCE.items()}

_SAMPLING_FIELDS = ("temperature", "top_p", "top_k", "min_p", "kept_tokens", "seed")
_SEGMENT_FIELDS = ("policy_version", "kv_min_version", "temperature")
_OUTCOME_FIELDS = ("value", "message", "shared_by")
_TRAJECTORY_FIELDS = (
    *("trajectory_id", "group_id", "member_index", "shaped_reward", "birth_version", "traceparent"),
    "cut_token_count",
)
"""Fields with the same name and value in a dataclass and its message."""


def same_fields(source: object, names: Iterable[str]) -> dict[str, Any]:
    """Return these fields of a dataclass or a message, for the constructor of the other."""
    return {name: getattr(source, name) for name in names}


def tensor_to_pb(array: npt.NDArray[Any]) -> pb.Tensor:
    """Encode a one-dimensional int32 or float32 array."""
    message = pb.Tensor()
    _fill_tensor(message, array)
    return message


def _fill_tensor(message: pb.Tensor, array: npt.NDArray[Any]) -> None:
    # In place: a separate tensor would be copied once more into its message.
    if array.ndim != 1:
        raise DataError(f"tensor: expected one dimension, got shape {array.shape}")
    if array.dtype.kind == "i":
        message.dtype, message.data = pb.DTYPE_INT32, np.ascontiguousarray(array, _INT32).tobytes()
    elif array.dtype.kind == "f":
        message.dtype, message.data = pb.DTYPE_FLOAT32, np.ascontiguousarray(array, _FLOAT32).tobytes()
    else:
        raise DataError(f"tensor: dtype {array.dtype} is neither int32 nor float32")


def _array(message: pb.Tensor, expected: int, field: str) -> npt.NDArray[Any]:
    if message.dtype != expected:
        raise DataError(f"{field}: dtype tag {message.dtype}, expected {pb.Dtype.Name(expected)}")
    dtype = _DTYPES[expected]
    if len(message.data) % dtype.itemsize:
        raise DataError(f"{field}: {len(message.data)} bytes, expected a multiple of {dtype.itemsize}")
    return np.frombuffer(message.data, dtype)


def ids_from_pb(message: pb.Tensor, field: str = "token_ids") -> Int32Array:
    """Decode int32 token ids as a read-only view of the message's bytes, [tokens]."""
    return _array(message, pb.DTYPE_INT32, field)


def floats_from_pb(message: pb.Tensor, field: str = "behavior_logprobs") -> Float32Array:
    """Decode float32 values as a read-only view of the message's bytes, [tokens]."""
    return _array(message, pb.DTYPE_FLOAT32, field)


def finish_to_pb(reason: FinishReason | None) -> Any:
    """Encode a finish reason; None is UNSPECIFIED (not finished)."""
    return pb.FINISH_REASON_UNSPECIFIED if reason is None else _FINISH[reason]


def finish_from_pb(value: Any) -> FinishReason | None:
    """Decode a finish reason; UNSPECIFIED and unknown values are None."""
    return _FINISH_BACK.get(value)


def sampling_to_pb(params: SamplingParams) -> pb.SamplingParams:
    """Encode sampling parameters."""
    return pb.SamplingParams(**same_fields(params, _SAMPLING_FIELDS), stop_token_ids=params.stop_token_ids)


def sampling_from_pb(message: pb.SamplingParams) -> SamplingParams:
    """Decode sampling parameters."""
    return SamplingParams(**same_fields(message, _SAMPLING_FIELDS), stop_token_ids=tuple(message.stop_token_ids))


def segment_to_pb(segment: Segment) -> pb.Segment:
    """Encode a segment."""
    message = pb.Segment(**same_fields(segment, _SEGMENT_FIELDS), source=_SOURCE[segment.source])
    _fill_tensor(message.token_ids, segment.token_ids)
    if segment.behavior_logprobs is not None:
        _fill_tensor(message.behavior_logprobs, segment.behavior_logprobs)
    if segment.kept_sets is not None:
        message.kept_sets = pack_sets(segment.kept_sets)
    return message


def segment_from_pb(message: pb.Segment) -> Segment:
    """Decode a segment; policy segments must carry one logprob per token."""
    source = _SOURCE_BACK.get(message.source)
    if source is None:
        raise DataError(f"segment.source={message.source}: expected a known source")
    ids = ids_from_pb(message.token_ids, "segment.token_ids")
    logprobs: Float32Array | None = None
    if source is SegmentSource.POLICY:
        logprobs = floats_from_pb(message.behavior_logprobs, "segment.behavior_logprobs")
        if len(logprobs) != len(ids):
            raise DataError(f"segment: {len(ids)} token_ids but {len(logprobs)} behavior_logprobs")
    sets = kept_sets_from_pb(message.kept_sets, ids)
    same = same_fields(message, _SEGMENT_FIELDS)
    return Segment(token_ids=ids, behavior_logprobs=logprobs, source=source, kept_sets=sets, **same)


def kept_sets_from_pb(data: bytes, token_ids: Int32Array) -> KeptSets | None:
    """Decode the kept sets of these tokens; no bytes are None, DataError if a set is no set of its token."""
    if not data:
        return None
    sets = unpack_sets(data, len(token_ids))
    check_sets(sets, token_ids)
    return sets


def prompt_to_pb(prompt: Prompt) -> pb.Prompt:
    """Encode a prompt; DataError if its metadata is not JSON."""
    try:
        metadata = json.dumps(dict(prompt.metadata), ensure_ascii=False, allow_nan=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"prompt {prompt.prompt_id}: metadata: {error}; use JSON values and finite numbers") from error
    return pb.Prompt(
        token_ids=tensor_to_pb(prompt.token_ids),
        verifier=prompt.verifier,
        metadata=metadata,
        prompt_id=prompt.prompt_id,
        domain=prompt.domain,
    )


def prompt_from_pb(message: pb.Prompt) -> Prompt:
    """Decode a prompt; the keys of its metadata have the order of the row."""
    try:
        metadata = json.loads(message.metadata or b"{}", parse_constant=_no_json)
    except (ValueError, RecursionError) as error:
        raise DataError(f"prompt {message.prompt_id}: metadata: {error}") from error
    if not isinstance(metadata, dict):
        raise DataError(f"prompt {message.prompt_id}: metadata: not a JSON object")
    return Prompt(
        prompt_id=message.prompt_id,
        token_ids=ids_from_pb(message.token_ids, "prompt.token_ids"),
        verifier=message.verifier,
        metadata=metadata,
        domain=message.domain,
    )


def _no_json(constant: str) -> None:
    raise ValueError(f"{constant} is no JSON number")


def outcome_to_pb(outcome: RewardOutcome) -> pb.RewardOutcome:
    """Encode an outcome."""
    return pb.RewardOutcome(
        **same_fields(outcome, _OUTCOME_FIELDS),
        kind=_OUTCOME[outcome.kind],
        parts=dict(outcome.parts),
        turns=[pb.TurnReturn(end=turn.end, value=turn.value) for turn in outcome.turns],
    )


def outcome_from_pb(message: pb.RewardOutcome) -> RewardOutcome:
    """Decode an outcome."""
    kind = _OUTCOME_BACK.get(message.kind)
    if kind is None:
        raise DataError(f"outcome.kind={message.kind}: expected a known kind")
    return RewardOutcome(
        **same_fields(message, _OUTCOME_FIELDS),
        kind=kind,
        parts=dict(message.parts),
        turns=tuple(TurnReturn(end=turn.end, value=turn.value) for turn in message.turns),
    )


def trajectory_to_pb(trajectory: Trajectory) -> pb.Trajectory:
    """Encode a trajectory."""
    message = pb.Trajectory(
        **same_fields(trajectory, _TRAJECTORY_FIELDS),
        prompt=prompt_to_pb(trajectory.prompt),
        segments=[segment_to_pb(s) for s in trajectory.segments],
        finish_reason=finish_to_pb(trajectory.finish_reason),
    )
    if trajectory.outcome is not None:
        message.outcome.CopyFrom(outcome_to_pb(trajectory.outcome))
    if trajectory.teacher is not None:
        message.teacher.CopyFrom(teacher_to_pb(trajectory.teacher))
    return message


def trajectory_from_pb(message: pb.Trajectory) -> Trajectory:
    """Decode a trajectory."""
    return Trajectory(
        **same_fields(message, _TRAJECTORY_FIELDS),
        prompt=prompt_from_pb(message.prompt),
        segments=tuple(segment_from_pb(s) for s in message.segments),
        finish_reason=finish_from_pb(message.finish_reason),
        outcome=outcome_from_pb(message.outcome) if message.HasField("outcome") else None,
        teacher=teacher_from_pb(message.teacher) if message.HasField("teacher") else None,
    )


def teacher_to_pb(column: TeacherColumn) -> pb.TeacherColumn:
    """Encode a teacher's scores."""
    message = pb.TeacherColumn(teacher=column.teacher, manifest_digest=column.manifest_digest)
    _fill_tensor(message.logprobs, column.logprobs)
    if column.top_ids is not None and column.top_logprobs is not None:
        message.top_k = column.top_ids.shape[1]
        _fill_tensor(message.top_ids, column.top_ids.ravel())
        _fill_tensor(message.top_logprobs, column.top_logprobs.ravel())
    return message


def teacher_from_pb(message: pb.TeacherColumn) -> TeacherColumn:
    """Decode a teacher's scores. Raises DataError for arrays of other sizes than the number of tokens."""
    logprobs = floats_from_pb(message.logprobs, "teacher.logprobs")
    top: dict[str, Any] = {}
    if message.top_k:
        top = {
            "top_ids": ids_from_pb(message.top_ids, "teacher.top_ids"),
            "top_logprobs": floats_from_pb(message.top_logprobs, "teacher.top_logprobs"),
        }
        shape = (len(logprobs), message.top_k)
        for name, values in top.items():
            if values.size != shape[0] * shape[1]:
                raise DataError(f"teacher.{name}: {values.size} values, expected {shape[0]} tokens times {shape[1]}")
            top[name] = values.reshape(shape)
    return TeacherColumn(teacher=message.teacher, manifest_digest=message.manifest_digest, logprobs=logprobs, **top)


def batch_to_pb(batch: Batch) -> pb.Batch:
    """Encode a batch."""
    return pb.Batch(
        train_step=batch.train_step,
        groups=[
            pb.Group(
                group_id=g.group_id,
                admission_index=g.admission_index,
                trajectories=[trajectory_to_pb(t) for t in g.trajectories],
            )
            for g in batch.groups
        ],
    )


def batch_from_pb(message: pb.Batch) -> Batch:
    """Decode a batch."""
    return Batch(
        train_step=message.train_step,
        groups=tuple(
            Group(
                group_id=g.group_id,
                admission_index=g.admission_index,
                trajectories=tuple(trajectory_from_pb(t) for t in g.trajectories),
            )
            for g in message.groups
        ),
    )
