"""Chunks of one writer become one segment, and nothing else changes."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.segments import join_segments, slice_segment
from rollmesh.types import KeptSets, Segment, SegmentSource


def written(
    tokens: int, version: int = 0, kv_min_version: int = 0, temperature: float = 1.0, truncated: bool = False
) -> Segment:
    rng = np.random.default_rng(tokens)
    counts = np.arange(tokens, dtype=np.int32)
    kept_sets = KeptSets(counts=counts, ids=np.arange(counts.sum(), dtype=np.int32)) if truncated else None
    return Segment(
        token_ids=rng.integers(0, 99, tokens, dtype=np.int32),
        behavior_logprobs=-rng.random(tokens, dtype=np.float32),
        policy_version=version,
        kv_min_version=kv_min_version,
        temperature=temperature,
        kept_sets=kept_sets,
    )


def said(tokens: int) -> Segment:
    return replace(written(tokens), behavior_logprobs=None, source=SegmentSource.ENVIRONMENT)


def columns(segments: tuple[Segment, ...] | list[Segment]) -> list[tuple[object, ...]]:
    """Return the fields of every token."""
    rows: list[tuple[object, ...]] = []
    for s in segments:
        logprobs = [None] * len(s) if s.behavior_logprobs is None else s.behavior_logprobs.tolist()
        sets: list[object] = [None] * len(s)
        if s.kept_sets is not None:
            sets = [part.tolist() for part in np.split(s.kept_sets.ids, np.cumsum(s.kept_sets.counts))[:-1]]
        rows += zip(s.token_ids.tolist(), logprobs, sets, *([value] * len(s) for value in writer_of(s)), strict=True)
    return rows


def writer_of(s: Segment) -> tuple[object, ...]:
    return (s.source, s.policy_version, s.kv_min_version, s.temperature, s.kept_sets is not None)


CHUNKS = st.one_of(
    st.builds(
        written, st.integers(1, 5), st.integers(0, 2), st.integers(0, 1), st.sampled_from([0.7, 1.0]), st.booleans()
    ),
    st.builds(said, st.integers(1, 5)),
)  # fmt: skip


@given(st.lists(CHUNKS, max_size=12))
def test_every_token_keeps_its_logprob_and_its_writer_and_no_two_neighbours_have_one_writer(chunks):
    joined = join_segments(chunks)
    assert columns(joined) == columns(chunks)
    writers = [writer_of(s) for s in joined]
    assert all(a != b for a, b in itertools.pairwise(writers))
    for segment in joined:
        assert segment.token_ids.dtype == np.int32
        assert segment.behavior_logprobs is None or segment.behavior_logprobs.dtype == np.float32


@given(st.integers(1, 9), st.data())
def test_a_part_has_its_own_tokens_and_their_logprobs(tokens, data):
    whole = data.draw(st.sampled_from([written(tokens), written(tokens, truncated=True), said(tokens)]))
    start = data.draw(st.integers(0, tokens))
    end = data.draw(st.one_of(st.none(), st.integers(start, tokens)))
    assert columns([slice_segment(whole, start, end)]) == columns([whole])[start:end]
