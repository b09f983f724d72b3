import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmesh.errors import DataError
from rollmesh.types import (
    Batch,
    FinishReason,
    Group,
    OutcomeKind,
    Prompt,
    RewardOutcome,
    Segment,
    SegmentSource,
    Trajectory,
)
from rollmesh.v1 import trajectory_pb2 as pb
from rollmesh.wire import codec

ODD = pb.Tensor(dtype=pb.DTYPE_INT32, data=b"abc")
int32 = st.integers(-(2**31), 2**31 - 1)
floats = st.floats(width=32, allow_nan=False)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(-1e9, 1e9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@st.composite
def segments(draw: st.DrawFn) -> Segment:
    ids = np.array(draw(st.lists(int32, max_size=20)), np.int32)
    policy = draw(st.booleans())
    logprobs = np.array(draw(st.lists(floats, min_size=len(ids), max_size=len(ids))), np.float32) if policy else None
    return Segment(
        token_ids=ids,
        behavior_logprobs=logprobs,
        policy_version=draw(st.integers(0, 2**40)),
        kv_min_version=draw(st.integers(0, 2**40)),
        source=SegmentSource.POLICY if policy else SegmentSource.ENVIRONMENT,
        temperature=draw(st.floats(0.1, 2.0)),
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
            )
        ),
        shaped_reward=draw(st.floats(-5, 5)),
        birth_version=draw(st.integers(0, 99)),
    )


def same(a: Trajectory, b: Trajectory) -> None:
    assert (a.trajectory_id, a.group_id, a.member_index) == (b.trajectory_id, b.group_id, b.member_index)
    assert (a.finish_reason, a.outcome, a.shaped_reward) == (b.finish_reason, b.outcome, b.shaped_reward)
    np.testing.assert_array_equal(a.prompt.token_ids, b.prompt.token_ids)
    assert dict(a.prompt.metadata) == dict(b.prompt.metadata)
    assert len(a.segments) == len(b.segments)
    for x, y in zip(a.segments, b.segments, strict=True):
        np.testing.assert_array_equal(x.token_ids, y.token_ids)
        assert (x.behavior_logprobs is None) == (y.behavior_logprobs is None)
        if x.behavior_logprobs is not None:
            np.testing.assert_array_equal(x.behavior_logprobs, y.behavior_logprobs)
        assert (x.policy_version, x.kv_min_version, x.source) == (y.policy_version, y.kv_min_version, y.source)


@settings(max_examples=50)
@given(st.lists(trajectories(), max_size=3))
def test_a_batch_survives_the_wire_bit_for_bit(members: list[Trajectory]) -> None:
    batch = Batch(train_step=7, groups=(Group(group_id="g", admission_index=3, trajectories=tuple(members)),))
    data = codec.batch_to_pb(batch).SerializeToString()
    again = codec.batch_from_pb(pb.Batch.FromString(data))
    assert again.train_step == 7
    for before, after in zip(members, again.groups[0].trajectories, strict=True):
        same(before, after)


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (pb.Segment(source=pb.SEGMENT_SOURCE_POLICY), "dtype tag"),
        (
            pb.Segment(token_ids=pb.Tensor(dtype=pb.DTYPE_INT32, data=b"abc"), source=pb.SEGMENT_SOURCE_POLICY),
            "3 bytes",
        ),
        (
            pb.Segment(
                token_ids=codec.tensor_to_pb(np.arange(3, dtype=np.int32)),
                behavior_logprobs=codec.tensor_to_pb(np.zeros(2, np.float32)),
                source=pb.SEGMENT_SOURCE_POLICY,
            ),
            "3 token_ids but 2 behavior_logprobs",
        ),
        (pb.Segment(token_ids=codec.tensor_to_pb(np.arange(3, dtype=np.int32))), "segment.source"),
    ],
)
def test_a_malformed_segment_is_refused_with_the_field_named(message: pb.Segment, text: str) -> None:
    with pytest.raises(DataError, match=text):
        codec.segment_from_pb(message)


@pytest.mark.parametrize(
    "value",
    [{1, 2}, b"bytes", np.int64(3), float("nan"), float("inf"), 10**400, "\ud800", {1: "a number as a key"}],
    ids=lambda value: repr(value)[:20],
)
def test_metadata_that_is_not_json_is_refused_with_the_prompt_named(value: object) -> None:
    prompt = Prompt(
        prompt_id="row-7", token_ids=np.arange(3, dtype=np.int32), verifier="exact", metadata={"rows": [value]}
    )
    with pytest.raises(DataError, match="prompt row-7: metadata: .*; use JSON values"):
        codec.prompt_to_pb(prompt)


def test_a_number_that_json_does_not_have_is_refused_when_read() -> None:
    message = pb.Prompt(prompt_id="row-7")
    message.metadata["answer"] = float("nan")
    with pytest.raises(DataError, match="prompt row-7: metadata: "):
        codec.prompt_from_pb(message)


def test_numbers_of_the_metadata_keep_their_kind() -> None:
    metadata = {"answer": 42, "share": 0.5, "rows": [[1, 2.25], {"n": -3}], "huge": 1e300, "yes": True, "none": None}
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact", metadata=metadata)
    again = codec.prompt_from_pb(pb.Prompt.FromString(codec.prompt_to_pb(prompt).SerializeToString())).metadata
    assert repr(dict(sorted(again.items()))) == repr(dict(sorted(metadata.items())))
