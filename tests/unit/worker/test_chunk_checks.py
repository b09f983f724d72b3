from dataclasses import replace

import numpy as np
import pytest

from rollmesh.kept_sets import stack_sets
from rollmesh.types import Chunk, FinishReason
from rollmesh.worker.chunk_checks import Expected, GarbageAnswer, check_chunk

EXPECTED = Expected(
    vocab_size=100,
    min_version=3,
    newest_version=5,
    pinned_version=None,
    stop_token_ids=(7,),
    max_context_tokens=64,
)


def chunk(ids=(1, 2), logprobs=None, version=4, kv=None, finish=None, kept=None):
    ids = np.asarray(ids, np.int32)
    return Chunk(
        token_ids=ids,
        behavior_logprobs=np.asarray(np.full(len(ids), -0.5) if logprobs is None else logprobs, np.float32),
        policy_version=version,
        kv_min_version=version if kv is None else kv,
        finish_reason=finish,
        kept_sets=None if kept is None else stack_sets([np.array(each, np.int32) for each in kept]),
    )


def check(answer, *, remaining=10, context=20, expected=EXPECTED):
    check_chunk(answer, expected, remaining=remaining, context_tokens=context)


@pytest.mark.parametrize(
    "answer",
    [
        chunk(),
        chunk(ids=()),
        chunk(logprobs=(0.0, -80.0)),
        chunk(logprobs=(1e-6, -1.0)),
        chunk(ids=(1, 7), finish=FinishReason.STOP),
        chunk(ids=range(10), finish=FinishReason.LENGTH),
        chunk(ids=(), finish=FinishReason.INTERRUPTED),
        chunk(version=5, kv=0),
    ],
)
def test_possible_continuations_pass(answer):
    check(answer)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (chunk(logprobs=(-1.0, float("nan"))), "logprob"),
        (chunk(logprobs=(-1.0, float("-inf"))), "logprob"),
        (chunk(logprobs=(-1.0, 0.5)), "logprob"),
        (chunk(logprobs=(-1.0, -3.4e38)), "logprob"),
        (chunk(logprobs=(-1.0,)), "lengths"),
        (chunk(ids=(1, 100)), "token_id"),
        (chunk(ids=(1, -1)), "token_id"),
        (chunk(ids=range(11)), "too_many_tokens"),
        (chunk(version=2), "version"),
        (chunk(version=6), "version"),
        (chunk(version=4, kv=5), "version"),
        (chunk(ids=(7, 1), finish=FinishReason.STOP), "finish_reason"),
        (chunk(ids=(), finish=FinishReason.STOP), "finish_reason"),
        (chunk(ids=(1,), finish=FinishReason.LENGTH), "finish_reason"),
        (chunk(finish=FinishReason.ENVIRONMENT), "finish_reason"),
    ],
)
def test_impossible_answers_are_named(answer, reason):
    with pytest.raises(GarbageAnswer) as error:
        check(answer)
    assert error.value.reason == reason


def test_a_full_context_ends_an_answer_before_its_budget():
    check(chunk(ids=(1, 2), finish=FinishReason.LENGTH), context=62)


def test_a_pinned_call_takes_no_other_version():
    pinned = replace(EXPECTED, pinned_version=4)
    check(chunk(version=4), expected=pinned)
    with pytest.raises(GarbageAnswer, match="pinned to 4"):
        check(chunk(version=5), expected=pinned)


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (chunk(), "0 of 2 tokens have a kept set, expected all"),
        (chunk(kept=([1], [])), "1 of 2 tokens have a kept set, expected all"),
        (chunk(kept=([1, 3], [2, 3, 4, 5])), "a kept set of 4 tokens, expected at most 3"),
        (chunk(kept=([1, 3], [2, 100])), "outside"),
    ],
)
def test_of_a_call_with_truncated_sampling_every_token_needs_a_kept_set_within_the_bound(answer, text):
    truncated = replace(EXPECTED, kept_tokens=3)
    check(chunk(kept=([1, 3], [2, 3, 4])), expected=truncated)
    check(chunk(ids=(), finish=FinishReason.INTERRUPTED), expected=truncated)
    with pytest.raises(GarbageAnswer, match=text) as error:
        check(answer, expected=truncated)
    assert error.value.reason == "kept_sets"


def test_a_call_with_full_sampling_takes_no_kept_sets():
    with pytest.raises(GarbageAnswer, match="2 of 2 tokens have a kept set, expected none"):
        check(chunk(kept=([1], [2])))
