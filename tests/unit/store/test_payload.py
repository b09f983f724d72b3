"""Payload at rest: what is inline, what is linked, and digests."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.errors import DataError
from rollmesh.segments import join_segments, slice_segment
from rollmesh.store.payload import (
    INLINE_LIMIT_BYTES,
    LINK_MARK,
    TokenDigest,
    build_trajectory,
    decode_prompt,
    decode_segments,
    encode_prompt,
    encode_segments,
    group_of,
)
from rollmesh.store.trajectories import by_groups
from rollmesh.types import FinishReason, KeptSets, Prompt, Segment, SegmentSource

from ...kit.records import policy_tokens


def segment(tokens: int, version: int = 3, source: SegmentSource = SegmentSource.POLICY, kept: int = 0) -> Segment:
    """A segment whose tokens were drawn from sets of ``kept`` tokens; 0 for the full vocabulary."""
    sets = None
    if kept and source is SegmentSource.POLICY:
        ids = np.arange(tokens, dtype=np.int32)[:, None] + 1000 * np.arange(kept, dtype=np.int32)
        sets = KeptSets(counts=np.full(tokens, kept, np.int32), ids=ids.ravel())
    logprobs = np.linspace(-1, 0, tokens, dtype=np.float32) if source is SegmentSource.POLICY else None
    return policy_tokens(range(tokens), version, behavior_logprobs=logprobs, source=source, kept_sets=sets)


def same(left: Segment, right: Segment) -> bool:
    return (
        np.array_equal(left.token_ids, right.token_ids)
        and (left.behavior_logprobs is None) == (right.behavior_logprobs is None)
        and (left.behavior_logprobs is None or np.array_equal(left.behavior_logprobs, right.behavior_logprobs))
        and (left.policy_version, left.source) == (right.policy_version, right.source)
        and (left.kept_sets is None) == (right.kept_sets is None)
        and (left.kept_sets is None or np.array_equal(left.kept_sets.counts, right.kept_sets.counts))
        and (left.kept_sets is None or np.array_equal(left.kept_sets.ids, right.kept_sets.ids))
    )


SHAPES = st.tuples(st.integers(1, 20_000), st.integers(0, 5), st.sampled_from(SegmentSource), st.integers(0, 3))


@given(st.lists(SHAPES, max_size=4))
def test_segments_come_back_as_they_went_in(shapes: list[tuple[int, int, SegmentSource, int]]) -> None:
    segments = [segment(*shape) for shape in shapes]
    chunk = encode_segments(segments)
    uploads = {LINK_MARK + name.encode(): data for name, data in chunk.uploads}
    back = decode_segments(chunk.elements, uploads)
    assert len(back) == len(segments)
    assert all(same(a, b) for a, b in zip(segments, back, strict=True))
    assert all(len(element) <= INLINE_LIMIT_BYTES for element in chunk.elements)
    assert chunk.token_count == sum(len(s) for s in segments)
    versions = sorted({s.policy_version for s in segments if s.source is SegmentSource.POLICY})
    assert chunk.versions == ",".join(map(str, versions))


def test_a_digest_tells_other_tokens_other_logprobs_and_other_versions() -> None:
    base = segment(4)
    others = [
        segment(5),
        segment(4, version=2),
        segment(4, source=SegmentSource.ENVIRONMENT),
        replace(base, behavior_logprobs=np.zeros(4, np.float32)),
    ]
    assert TokenDigest().extended([base]) == TokenDigest().extended([segment(4)])
    assert len({str(TokenDigest().extended([s])) for s in (base, *others)}) == 5


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 2), st.sampled_from(SegmentSource)), max_size=5), st.data())
def test_a_running_digest_does_not_depend_on_how_the_tokens_were_cut(
    shapes: list[tuple[int, int, SegmentSource]], data: st.DataObject
) -> None:
    segments = [segment(*shape) for shape in shapes]
    whole, cut = TokenDigest().extended(join_segments(segments)), TokenDigest()
    for part in segments:
        at = data.draw(st.integers(0, len(part)))
        cut = cut.extended([slice_segment(part, 0, at)]).extended([slice_segment(part, at)])
    assert cut == whole
    assert whole.token_count == sum(map(len, segments))


def test_empty_segments_leave_no_trace() -> None:
    assert encode_segments([segment(0)]).elements == ()


def test_a_policy_segment_without_logprobs_is_refused() -> None:
    broken = Segment(token_ids=np.arange(3, dtype=np.int32), behavior_logprobs=None, policy_version=4, kv_min_version=4)
    with pytest.raises(DataError, match="version 4"):
        encode_segments([broken])


def test_a_prompt_comes_back_and_an_empty_one_is_refused() -> None:
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact", metadata={"answer": "x"})
    back = decode_prompt(encode_prompt(prompt))
    assert (back.prompt_id, back.verifier, back.metadata) == ("p", "exact", {"answer": "x"})
    with pytest.raises(DataError, match="'empty' is empty"):
        encode_prompt(Prompt(prompt_id="empty", token_ids=np.empty(0, np.int32), verifier="exact"))


def test_a_trajectory_id_names_its_group_and_member() -> None:
    prompt = Prompt(prompt_id="p", token_ids=np.arange(3, dtype=np.int32), verifier="exact")
    trajectory = build_trajectory("e1-20r2.13", prompt, finish=b"stop", reward=b"0.25")
    assert (trajectory.group_id, trajectory.member_index) == ("e1-20r2", 13) == (group_of("e1-20r2.13"), 13)
    assert (trajectory.finish_reason, trajectory.shaped_reward) == (FinishReason.STOP, 0.25)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 9)), max_size=200), st.integers(1, 4))
def test_parts_keep_the_order_and_stay_within_their_bounds(members: list[tuple[int, int]], groups: int) -> None:
    ids = [f"e0-{group}.{member}" for group, member in members]
    parts = by_groups(ids, groups)
    assert [i for part in parts for i in part] == ids
    assert all(1 <= len(part) <= 64 and len({group_of(i) for i in part}) <= groups for part in parts)
