"""A call may be so far ahead of what its caller has saved, and no further."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.generator.acknowledgements import Acknowledgements
from rollmesh.types import GenerationCall, SamplingParams


def call(context: int = 10, chunk: int = 4, name: str = "t") -> GenerationCall:
    return GenerationCall(
        trajectory_id=name,
        context_ids=np.zeros(context, np.int32),
        prompt_token_count=5,
        max_new_token_count=1000,
        sampling=SamplingParams(),
        chunk_token_count=chunk,
    )


@given(
    chunk=st.integers(1, 8),
    spare=st.integers(0, 16),
    steps=st.lists(
        st.one_of(st.integers(1, 8).map(lambda n: ("chunk", n)), st.integers(0, 60).map(lambda n: ("ack", n)))
    ),
)
def test_no_call_goes_on_that_the_next_chunk_could_take_beyond_its_limit(
    chunk: int, spare: int, steps: list[tuple[str, int]]
) -> None:
    limit = chunk + spare
    acknowledgements = Acknowledgements()
    with acknowledgements.of(call(context=10, chunk=chunk), limit) as backlog:
        sampled = durable = 10
        for kind, count in steps:
            if kind == "ack":
                acknowledgements.acknowledge("t", count)
                durable = max(durable, min(count, sampled))
                continue
            size = min(count, chunk)
            sampled += size
            ended = backlog.add(size)
            assert ended is (sampled - durable + chunk > limit)
            assert sampled - durable <= limit
            if ended:
                assert not backlog.add(0), "a call is told once"
                return


def test_a_call_without_a_limit_never_ends_for_want_of_acknowledgements() -> None:
    with Acknowledgements().of(call(), 0) as backlog:
        assert not any(backlog.add(4) for _ in range(1000))


def test_a_late_report_about_the_last_call_does_not_vouch_for_tokens_of_this_one() -> None:
    acknowledgements = Acknowledgements()
    with acknowledgements.of(call(context=10), 8) as first:
        first.add(4)
    with acknowledgements.of(call(context=14), 8) as second:
        acknowledgements.acknowledge("t", 14)
        assert not second.add(4)
        acknowledgements.acknowledge("t", 12)
        assert second.add(4)


def test_reports_reach_the_calls_of_their_trajectory_only_and_end_with_them() -> None:
    acknowledgements = Acknowledgements()
    with acknowledgements.of(call(name="a"), 8) as a, acknowledgements.of(call(name="b"), 8) as b:
        with acknowledgements.of(call(name="a"), 8) as given_up:
            given_up.add(4)
        a.add(4), b.add(4)
        acknowledgements.acknowledge("a", 14)
        assert not a.add(4)
        assert b.add(4)
    acknowledgements.acknowledge("a", 18)
    assert a.durable == 14
