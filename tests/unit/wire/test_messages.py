"""Messages on the wire: what is encoded is decoded, and malformed bytes name their field."""

import dataclasses
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.errors import DataError, EngineError, GenerationRefused
from rollmesh.types import (
    Batch,
    Chunk,
    FinishReason,
    GenerationCall,
    Group,
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
    VersionNeed,
)
from rollmesh.v1 import generation_service_pb2, reward_service_pb2, trajectory_pb2
from rollmesh.wire import codec
from rollmesh.wire.generation_client import (
    ERROR_KEY,
    chunk_from_pb,
    chunk_to_pb,
    error_from_rpc,
    request_from_pb,
    request_to_pb,
)
from rollmesh.wire.reward_messages import ScoreItemHead, bytes_fields, score_item_head, score_item_to_pb, score_items

ODD = trajectory_pb2.Tensor(dtype=trajectory_pb2.DTYPE_INT32, data=b"abc")
int32 = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = np.array(draw(st.lists(int32, max_size=20)), np.int32)
    policy = draw(st.booleans())
    logprobs = np.array(draw(st.lists(floats, min_size=len(ids), max_size=len(ids))), np.float32) if policy else None
    truncated = policy and bool((ids >= 0).all()) and draw(st.booleans())
    return Segment(
        token_ids=ids,
        behavior_logprobs=logprobs,
        policy_version=draw(st.integers(0, 2**40)),
        kv_min_version=draw(st.integers(0, 2**40)),
        source=SegmentSource.POLICY if policy else SegmentSource.ENVIRONMENT,
        temperature=draw(st.floats(0.1, 2.0)),
        kept_sets=KeptSets(counts=np.ones(len(ids), np.int32), ids=ids) if truncated else None,
    )


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    return Trajectory(
        trajectory_id=draw(st.text(max_size=10)),
        group_id=draw(st.text(max_size=10)),
        member_index=draw(st.integers(0, 1000)),
        prompt=Prompt(
            prompt_id="p",
            token_ids=np.array(draw(st.lists(int32, max_size=5)), np.int32),
            verifier="exact",
            metadata=draw(st.dictionaries(st.text(max_size=5), json_values, max_size=3)),
        ),
        segments=tuple(draw(st.lists(segments(), max_size=4))),
        finish_reason=draw(st.sampled_from([None, *FinishReason])),
        outcome=draw(
            st.none()
            | st.builds(
                RewardOutcome,
                kind=st.sampled_from(OutcomeKind),
                value=st.floats(-5, 5),
                parts=st.dictionaries(st.text(max_size=3), st.floats(-1, 1), max_size=2),
                message=st.text(max_size=5),
                turns=st.lists(st.builds(TurnReturn, end=st.integers(0, 99), value=st.floats(-5, 5)), max_size=3).map(
                    tuple
                ),
                shared_by=st.text(max_size=3),
            )
        ),
        shaped_reward=draw(st.floats(-5, 5)),
        birth_version=draw(st.integers(0, 99)),
        teacher=draw(st.none() | teacher_columns()),
    )


@st.composite
def teacher_columns(draw: st.DrawFn) -> TeacherColumn:
    tokens, top_k = draw(st.integers(0, 4)), draw(st.integers(0, 3))
    scores = np.linspace(-9, 0, tokens * (top_k + 1), dtype=np.float32).reshape(tokens, top_k + 1)
    return TeacherColumn(
        teacher=draw(st.text(max_size=5)),
        manifest_digest=draw(st.text(max_size=5)),
        logprobs=scores[:, 0],
        top_ids=np.arange(tokens * top_k, dtype=np.int32).reshape(tokens, top_k) if top_k else None,
        top_logprobs=scores[:, 1:] if top_k else None,
    )


def plain(value: Any) -> Any:
    """The value with lists and bytes in place of its dataclasses and arrays, to be compared."""
    if isinstance(value, np.ndarray):
        return value.dtype, value.tobytes()
    if dataclasses.is_dataclass(value):
        return [plain(getattr(value, field.name)) for field in dataclasses.fields(value)]
    return [plain(each) for each in value] if isinstance(value, tuple) else value


@settings(max_examples=50)
@given(st.lists(trajectories(), max_size=3))
def test_a_batch_survives_the_wire_bit_for_bit(members: list[Trajectory]) -> None:
    batch = Batch(train_step=7, groups=(Group(group_id="g", admission_index=3, trajectories=tuple(members)),))
    data = codec.batch_to_pb(batch).SerializeToString()
    again = codec.batch_from_pb(trajectory_pb2.Batch.FromString(data))
    assert plain(again) == plain(batch)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (trajectory_pb2.Segment(source=trajectory_pb2.SEGMENT_SOURCE_POLICY), "dtype tag"),
        (trajectory_pb2.Segment(token_ids=ODD, source=trajectory_pb2.SEGMENT_SOURCE_POLICY), "3 bytes"),
        (
            trajectory_pb2.Segment(
                token_ids=codec.tensor_to_pb(np.arange(3, dtype=np.int32)),
                behavior_logprobs=codec.tensor_to_pb(np.zeros(2, np.float32)),
                source=trajectory_pb2.SEGMENT_SOURCE_POLICY,
            ),
            "3 token_ids but 2 behavior_logprobs",
        ),
        (trajectory_pb2.Segment(token_ids=codec.tensor_to_pb(np.arange(3, dtype=np.int32))), "segment.source"),
    ],
)
def test_a_malformed_segment_is_refused_with_the_field_named(message: trajectory_pb2.Segment, text: str) -> None:
    with pytest.raises(DataError, match=text):
        codec.segment_from_pb(message)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", np.int64(3), float("nan"), float("inf"), "\ud800"],
    ids=lambda value: repr(value)[:20],
)
def test_metadata_that_is_not_json_is_refused_with_the_prompt_named(value: object) -> None:
    prompt = Prompt(
        prompt_id="row-7", token_ids=np.arange(3, dtype=np.int32), verifier="exact", metadata={"rows": [value]}
    )
    with pytest.raises(DataError, match="prompt row-7: metadata: .*; use JSON values"):
        codec.prompt_to_pb(prompt)


@pytest.mark.parametrize("data", [b'{"answer": NaN}', b"[1]", b"\xff", b'{"a": ', b"[" * 100_000])
def test_metadata_that_is_no_json_object_is_refused_when_read(data: bytes) -> None:
    with pytest.raises(DataError, match="prompt row-7: metadata: "):
        codec.prompt_from_pb(trajectory_pb2.Prompt(prompt_id="row-7", metadata=data))


def test_the_metadata_keeps_its_order_and_the_kind_of_its_numbers() -> None:
    deep = {"z": [[1, 2.25, 2.0], {"n": -3, "a": None}], "huge": 1e300, "exact": 2**60, "yes": True}
    metadata = {"share": 0.5, "answer": 42, "rows": deep, "by": "é"}
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact", metadata=metadata)
    again = trajectory_pb2.Prompt.FromString(codec.prompt_to_pb(prompt).SerializeToString())
    assert repr(codec.prompt_from_pb(again).metadata) == repr(metadata)


CALL = GenerationCall(
    trajectory_id="e0-3.1",
    group_id="e0-3",
    context_ids=np.array([5, 6, 7], np.int32),
    prompt_token_count=2,
    max_new_token_count=9,
    sampling=SamplingParams(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, kept_tokens=9, seed=-3, stop_token_ids=(1, 2)
    ),
    chunk_token_count=4,
)


@pytest.mark.parametrize("pinned", [None, 0, 7])
def test_a_call_and_its_need_survive_the_wire(pinned):
    need = VersionNeed(min_version=3, pinned_version=pinned)
    request = generation_service_pb2.GenerateRequest.FromString(request_to_pb(CALL, "me", need).SerializeToString())
    call, found = request_from_pb(request)
    assert (request.instance_id, found, plain(call)) == ("me", need, plain(CALL))


SETS = KeptSets(counts=np.array([2, 0], np.int32), ids=np.array([1, 9], np.int32))


@pytest.mark.parametrize("sets", [None, SETS])
@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.INTERRUPTED])
def test_a_chunk_survives_the_wire(reason, sets):
    chunk = Chunk(
        token_ids=np.array([1, 2], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5], np.float32),
        policy_version=4,
        kv_min_version=2,
        finish_reason=reason,
        cached_token_count=12,
        kept_sets=sets,
    )
    found = chunk_from_pb(generation_service_pb2.GenerateResponse.FromString(chunk_to_pb(chunk).SerializeToString()))
    assert plain(found) == plain(chunk)


def test_a_malformed_chunk_is_the_generators_fault():
    with pytest.raises(EngineError, match="malformed chunk"):
        chunk_from_pb(generation_service_pb2.GenerateResponse())


def test_a_kept_set_without_its_own_token_is_refused_in_a_chunk_and_in_a_segment():
    sets = KeptSets(counts=np.array([2], np.int32), ids=np.array([1, 9], np.int32))
    columns = {"token_ids": np.array([4], np.int32), "behavior_logprobs": np.zeros(1, np.float32), "kept_sets": sets}
    chunk = Chunk(policy_version=0, kv_min_version=0, **columns)
    with pytest.raises(EngineError, match="malformed chunk.*its token, 4"):
        chunk_from_pb(chunk_to_pb(chunk))
    segment = Segment(policy_version=0, kv_min_version=0, **columns)
    with pytest.raises(DataError, match="its token, 4"):
        codec.segment_from_pb(codec.segment_to_pb(segment))


def rpc_error(code: grpc.StatusCode, kind: str | None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(ERROR_KEY, kind)] if kind else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="why")


@pytest.mark.parametrize(
    ("code", "kind", "received", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "GenerationRefused", False, GenerationRefused),
        (grpc.StatusCode.INVALID_ARGUMENT, "DataError", False, DataError),
        (grpc.StatusCode.INTERNAL, "EngineError", False, EngineError),
        (grpc.StatusCode.UNAVAILABLE, None, False, EngineError),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False, EngineError),
        (grpc.StatusCode.FAILED_PRECONDITION, "GenerationRefused", True, EngineError),
        (grpc.StatusCode.INVALID_ARGUMENT, "DataError", True, DataError),
        (grpc.StatusCode.INTERNAL, "SomethingElse", False, EngineError),
    ],
)
def test_only_an_invalid_call_and_a_refusal_before_the_first_token_keep_their_class(code, kind, received, expected):
    error = error_from_rpc(rpc_error(code, kind), "host:1", received)
    assert type(error) is expected
    assert "why" in str(error)


NAMES = st.text(max_size=300)


def item_of(trajectory_id: str, verifier: str, traceparent: str) -> reward_service_pb2.ScoreItem:
    """An item as the client encodes it."""
    ids = np.arange(7, dtype=np.int32)
    segment = Segment(token_ids=ids, behavior_logprobs=np.zeros(7, np.float32), policy_version=0, kv_min_version=0)
    return score_item_to_pb(
        Trajectory(
            trajectory_id=trajectory_id,
            group_id="g",
            member_index=0,
            prompt=Prompt(prompt_id="p", token_ids=ids, verifier=verifier, metadata={"answer": [1.5, {"a": None}]}),
            segments=(segment,),
            finish_reason=FinishReason.STOP,
            traceparent=traceparent,
        )
    )


@given(st.lists(st.tuples(NAMES, NAMES, NAMES), max_size=5))
def test_items_and_their_heads_are_those_that_were_encoded(heads: list[tuple[str, str, str]]) -> None:
    items = [item_of(*head) for head in heads]
    found = score_items(reward_service_pb2.ScoreRequest(items=items).SerializeToString(), 100)
    assert [reward_service_pb2.ScoreItem.FromString(item) for item in found] == items
    expected = [ScoreItemHead(trajectory_id=t, verifier=v, traceparent=p) for t, v, p in heads]
    assert [score_item_head(item) for item in found] == expected


@given(st.binary(max_size=200))
def test_any_bytes_are_items_or_an_error_of_ours(data: bytes) -> None:
    try:
        for item in score_items(data, 100):
            score_item_head(item)
    except DataError:
        return


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"\x0a\x00" * 4, "more than 3 fields in a message of 8 bytes"),
        (b"\x0a\x05abc", "a field of 5 bytes ends after the message"),
        (b"\x0b", "wire type 3 is unknown"),
        (b"\xff" * 30, "a number does not end"),
        (b"\x09abc", "a field of 8 bytes ends after the message"),
    ],
)
def test_bytes_that_are_no_message_are_an_error(data: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        list(bytes_fields(data, 3))
