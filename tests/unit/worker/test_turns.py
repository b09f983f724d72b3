import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from rollmesh.types import Segment, SegmentSource
from rollmesh.worker.turns import turns_of

STOP = 9


def policy(*ids):
    ids = np.array(ids, np.int32)
    return Segment(token_ids=ids, behavior_logprobs=np.zeros(len(ids), np.float32), policy_version=0, kv_min_version=0)


def environment(*ids):
    return Segment(
        token_ids=np.array(ids, np.int32),
        behavior_logprobs=None,
        policy_version=0,
        kv_min_version=0,
        source=SegmentSource.ENVIRONMENT,
    )


def shape(segments):
    return [(t.token_ids.tolist(), t.complete, t.answered) for t in turns_of(segments, (STOP,))]


def test_turns_end_at_stop_tokens_whatever_the_chunks():
    segments = [policy(1, 2), policy(3, STOP), environment(5), policy(4), policy(STOP), policy(6)]
    assert shape(segments) == [([1, 2, 3, STOP], True, True), ([4, STOP], True, False), ([6], False, False)]


def test_a_reply_without_tokens_leaves_two_turns_next_to_each_other():
    assert shape([policy(1, STOP, 2, STOP)]) == [([1, STOP], True, False), ([2, STOP], True, False)]


def test_nothing_written_is_no_turn():
    assert shape([]) == []


@given(st.lists(st.sampled_from([1, 2, STOP]), max_size=20), st.data())
def test_cutting_chunks_elsewhere_changes_no_turn(ids, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(ids)), max_size=5)))
    parts = [ids[a:b] for a, b in zip([0, *cuts], [*cuts, len(ids)], strict=True)]
    assert shape([policy(*part) for part in parts]) == shape([policy(*ids)])
