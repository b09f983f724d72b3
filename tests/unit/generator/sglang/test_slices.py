"""Requests and answers of slices, without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from rollmesh.errors import DataError, EngineError
from rollmesh.generator.engines.call_limits import check_call
from rollmesh.generator.engines.sglang.slices import (
    Slice,
    TokenSpan,
    check_finite,
    chunks_of,
    read_scores,
    read_slice,
    slice_body,
    without,
)
from rollmesh.types import FinishReason, GenerationCall, SamplingParams

VOCAB = 50


def answer(tokens: list[int], spans: list[tuple[str, int, int]] | None = None, **meta: Any) -> dict[str, Any]:
    found = [("3", 0, len(tokens))] if spans is None else spans
    return {
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "length", "length": len(tokens)},
            "weight_version": found[-1][0] if found else "3",
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in found],
            "output_token_logprobs": [[-0.5 - t / 100, t, None] for t in tokens],
            "prompt_tokens": 9,
            "cached_tokens": 4,
            **meta,
        },
    }


def read(body: dict[str, Any], budget: int = 8, sole: int | None = None, **sampling: Any) -> Slice:
    return read_slice(body, SamplingParams(**sampling), vocab_size=VOCAB, budget=budget, sole_version=sole)


def piece(*spans: tuple[int, int], **fields: Any) -> Slice:
    """A slice of tokens 0, 1, 2... in spans of (version, tokens)."""
    ends = np.cumsum([count for _, count in spans]).tolist()
    return Slice(
        token_ids=np.arange(ends[-1], dtype=np.int32),
        logprobs=-np.arange(ends[-1], dtype=np.float32),
        spans=tuple(TokenSpan(policy_version=v, start=e - n, end=e) for (v, n), e in zip(spans, ends, strict=True)),
        **{"stopped": False, "aborted": False, **fields},
    )


def test_a_body_carries_ids_and_sampling_and_stops_only_where_the_call_says():
    sampling = SamplingParams(temperature=0.7, top_p=0.9, stop_token_ids=(4, 5))
    body = slice_body([1, 2, 3], 64, sampling, request_id="r", cache_key="k")
    assert body["input_ids"] == [1, 2, 3] and body["rid"] == "r" and body["extra_key"] == "k"
    assert body["return_logprob"] is True
    params = body["sampling_params"]
    assert (params["max_new_tokens"], params["temperature"], params["top_p"], params["top_k"]) == (64, 0.7, 0.9, -1)
    assert params["stop_token_ids"] == [4, 5] and not params["ignore_eos"]
    # A server's own preferences must not shape the distribution behind our back.
    assert (params["min_p"], params["repetition_penalty"]) == (0.0, 1.0)
    assert (params["frequency_penalty"], params["presence_penalty"]) == (0.0, 0.0)
    free = slice_body([1], 8, SamplingParams(top_k=3), request_id="r", cache_key="k")["sampling_params"]
    assert free["ignore_eos"] and free["top_k"] == 3


def test_an_answer_becomes_tokens_logprobs_and_spans():
    found = read(answer([5, 6, 7], [("2", 0, 1), ("3", 1, 3)]))
    assert found.token_ids.tolist() == [5, 6, 7] and found.token_ids.dtype == np.int32
    np.testing.assert_allclose(found.logprobs, [-0.55, -0.56, -0.57], rtol=1e-6)
    assert [(s.policy_version, s.start, s.end) for s in found.spans] == [(2, 0, 1), (3, 1, 3)]
    assert (found.prompt_token_count, found.cached_token_count) == (9, 4)


def test_only_the_call_s_own_stop_tokens_stop_it():
    reason = {"type": "stop", "matched": 7}
    assert read(answer([5, 7], finish_reason=reason), stop_token_ids=(7,)).stopped
    assert not read(answer([5, 7], finish_reason=reason), stop_token_ids=(8,)).stopped
    assert not read(answer([5, 7], finish_reason=reason)).stopped


def test_an_abort_in_the_queue_has_no_tokens_and_no_spans():
    meta = {"id": "r", "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    found = read({"output_ids": [], "meta_info": meta})
    assert found.aborted and len(found) == 0 and found.spans == ()


def test_without_spans_the_version_is_taken_only_where_no_load_met_the_slice():
    body = answer([5, 6])
    del body["meta_info"]["weight_versions"]
    assert [s.policy_version for s in read(body, sole=3).spans] == [3]
    for sole in (None, 2):
        with pytest.raises(EngineError, match="weight_versions"):
            read(body, sole=sole)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"meta_info": {}}, "no output_ids"),
        (answer([1, 2], [("3", 0, 1)]), "cover"),
        (answer([1, 2], [("3", 1, 2)]), "cover"),
        (answer([1, 2], [("2", 0, 2), ("3", 1, 2)]), "cover"),
        (answer([1, 2], [("default", 0, 2)]), "malformed"),
        (answer([1, 2], output_token_logprobs=[[-1.0, 1, None]]), "2 tokens do not match 1 log-prob"),
        (answer([1, 2], output_token_logprobs=[[-1.0, 1, None], [-1.0, 3, None]]), "log-probabilities"),
        (answer([1, VOCAB]), "outside the vocabulary"),
        (answer([1] * 9), "9 tokens, requested 8"),
        (answer([1], output_token_logprobs=[[]]), "malformed"),
    ],
)
def test_an_answer_that_cannot_be_true_is_an_engine_error(body, message):
    with pytest.raises(EngineError, match=message):
        read(body)


def test_tokens_of_a_refused_version_and_all_after_them_are_dropped():
    kept, fell = without(piece((0, 3), (1, 2), (0, 4)), {1}, 0)
    assert kept.token_ids.tolist() == [0, 1, 2] and kept.cut and not fell
    kept, fell = without(piece((1, 2), (0, 4), stopped=True), {1}, 0)
    assert len(kept) == 0 and not kept.stopped and not fell


def test_a_logprob_that_is_none_is_an_error_only_where_it_would_be_delivered():
    logprobs = [[-1.0, 1, None], [None, 2, None], [float("nan"), 3, None]]
    found = read(answer([1, 2, 3], [("3", 0, 1), ("4", 1, 3)], output_token_logprobs=logprobs))
    with pytest.raises(EngineError, match="not finite under policy version 4"):
        check_finite(found)
    kept, _ = without(found, {4}, 0)
    check_finite(kept)
    assert kept.token_ids.tolist() == [1]


def test_the_versions_of_a_call_never_fall():
    kept, fell = without(piece((1, 3), (0, 2)), set(), 0)
    assert (len(kept), fell) == (3, True)
    kept, fell = without(piece((1, 3)), set(), 2)
    assert (len(kept), fell) == (0, True)
    whole = piece((1, 3), (2, 2))
    assert without(whole, set(), 1) == (whole, False)


def test_a_slice_becomes_a_chunk_a_span_and_the_last_ends_the_call():
    chunks = chunks_of(piece((0, 3), (1, 2)), lambda v: 0, FinishReason.STOP, cached_token_count=6, idle_version=9)
    assert [(c.policy_version, c.kv_min_version, len(c.token_ids)) for c in chunks] == [(0, 0, 3), (1, 0, 2)]
    assert [c.finish_reason for c in chunks] == [None, FinishReason.STOP]
    assert [c.cached_token_count for c in chunks] == [6, 0]
    assert chunks[1].token_ids.tolist() == [3, 4] and chunks[1].behavior_logprobs.tolist() == [-3.0, -4.0]


def test_a_slice_without_tokens_is_a_chunk_only_where_it_ends_the_call():
    nothing = without(piece((1, 2)), {1}, 0)[0]
    assert chunks_of(nothing, lambda v: v, None, cached_token_count=0, idle_version=4) == []
    (end,) = chunks_of(nothing, lambda v: v, FinishReason.INTERRUPTED, cached_token_count=0, idle_version=4)
    assert (len(end.token_ids), end.policy_version, end.finish_reason) == (0, 4, FinishReason.INTERRUPTED)


def test_scores_are_those_of_the_tokens_after_the_first():
    body = {"meta_info": {"input_token_logprobs": [[None, 4, None], [-1.5, 5, None], [None, 6, None]]}}
    scores = read_scores(body, 3)
    assert scores[0] == -1.5 and np.isnan(scores[1])
    with pytest.raises(EngineError, match="3 input_token_logprobs for 4"):
        read_scores(body, 4)
    with pytest.raises(EngineError, match="no input_token_logprobs"):
        read_scores({"meta_info": {}}, 2)


def test_a_call_gets_its_budget_or_what_the_context_leaves():
    def call(context: int, budget: int) -> GenerationCall:
        return GenerationCall(
            trajectory_id="t",
            context_ids=np.zeros(context, np.int32),
            prompt_token_count=1,
            max_new_token_count=budget,
            sampling=SamplingParams(),
            chunk_token_count=8,
        )

    assert check_call(call(10, 5), vocab_size=VOCAB, longest=32) == 5
    assert check_call(call(30, 5), vocab_size=VOCAB, longest=32) == 2
    with pytest.raises(DataError, match="32 tokens leave no room"):
        check_call(call(32, 5), vocab_size=VOCAB, longest=32)
