"""A call may be so far ahead of the tokens that its caller has saved, and no further."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.types import GenerationCall, SamplingParams


def backlog(context: int = 10, chunk: int = 4, limit: int = 8) -> Backlog:
    return Backlog.of(
        GenerationCall(
            trajectory_id="t",
            context_ids=np.zeros(context, np.int32),
            prompt_token_count=5,
            max_new_token_count=1000,
            sampling=SamplingParams(),
            chunk_token_count=chunk,
            unacknowledged_token_limit=limit,
        )
    )


@given(
    chunk=st.integers(1, 8),
    spare=st.integers(0, 16),
    steps=st.lists(
        st.one_of(st.integers(1, 8).map(lambda n: ("chunk", n)), st.integers(0, 60).map(lambda n: ("ack", n)))
    ),
)
def test_no_chunk_begins_that_could_take_a_call_beyond_its_limit(
    chunk: int, spare: int, steps: list[tuple[str, int]]
) -> None:
    limit = chunk + spare
    call = backlog(chunk=chunk, limit=limit)
    sampled = durable = 10
    for kind, count in steps:
        if kind == "ack":
            call.acknowledge(count)
            durable = max(durable, min(count, sampled))
        elif not call.blocked:
            call.add(min(count, chunk))
            sampled += min(count, chunk)
        assert sampled - durable <= limit
        assert call.blocked is (sampled - durable + chunk > limit)


def test_a_call_without_a_limit_is_never_blocked() -> None:
    call = backlog(limit=0)
    call.add(4000)
    assert not call.blocked


def test_a_late_report_about_an_earlier_call_does_not_vouch_for_tokens_of_this_one() -> None:
    call = backlog(context=14)
    call.acknowledge(40)
    call.add(4)
    call.acknowledge(12)
    assert not call.blocked
    call.add(4)
    assert call.blocked
