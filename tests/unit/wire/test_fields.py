"""Fields read without decoding are the fields that protobuf decodes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import DataError
from rollmesh.types import FinishReason, Prompt, Segment, Trajectory
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.wire.reward_messages import ScoreItemHead, bytes_fields, score_item_head, score_item_to_pb, score_items

NAMES = st.text(max_size=300)


def item_of(trajectory_id: str, verifier: str, traceparent: str) -> pb.ScoreItem:
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
    found = score_items(pb.ScoreRequest(items=items).SerializeToString(), 100)
    assert [pb.ScoreItem.FromString(item) for item in found] == items
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
