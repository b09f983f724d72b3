"""Parts of the SGLang engine without a server: slices, policy folders, slots."""

import json
import re
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import DataError, EngineError
from rollmesh.generator.engines.call_limits import Backlog
from rollmesh.generator.engines.policy_folders import difference, read_folder
from rollmesh.generator.engines.sglang.engine_state import ServerCall, SlotQueue
from rollmesh.generator.engines.sglang.server import nothing_changed
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
from rollmesh.types import FinishReason, SamplingParams

from ....kit.generation import make_call

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
    assert "return_sampling_mask" not in body


def test_a_body_of_truncated_sampling_asks_for_the_sets_with_a_top_k_that_leaves_room_for_equals():
    for sampling, top_k in (
        (SamplingParams(top_p=0.9, kept_tokens=64), 48),
        (SamplingParams(top_k=7, min_p=0.1, kept_tokens=64), 7),
    ):
        body = slice_body([1], 8, sampling, request_id="r", cache_key="k")
        assert body["return_sampling_mask"] is True and body["sampling_logprobs_mode"] == "selected"
        found = body["sampling_params"]
        assert (found["top_p"], found["top_k"], found["min_p"]) == (sampling.top_p, top_k, sampling.min_p)


def masked(tokens: list[int], masks: list[list[int]]) -> dict[str, Any]:
    return answer(tokens, output_token_sampling_mask=masks, output_token_sampling_logprobs=[-0.25] * len(masks))


def test_the_sets_of_an_answer_ascend_and_its_logprobs_are_those_over_them():
    found = read(masked([5, 6, 7], [[9, 5], [6], [7, 1, 8]]), kept_tokens=3)
    assert (found.kept_sets.counts.tolist(), found.kept_sets.ids.tolist()) == ([2, 1, 3], [5, 9, 6, 1, 7, 8])
    assert found.logprobs.tolist() == [-0.25] * 3
    kept, _ = without(replace(found, spans=piece((3, 1), (4, 2)).spans), {4}, 0)
    assert kept.kept_sets is not None and kept.kept_sets.ids.tolist() == [5, 9]
    parts = chunks_of(
        replace(found, spans=piece((3, 1), (4, 2)).spans), lambda v: v, None, cached_token_count=0, idle_version=3
    )
    assert [each.kept_sets.ids.tolist() for each in parts if each.kept_sets] == [[5, 9], [6, 1, 7, 8]]


def test_an_answer_without_the_sets_that_were_asked_for_or_with_a_larger_one_is_refused():
    with pytest.raises(EngineError, match="output_token_sampling_mask"):
        read(answer([5]), kept_tokens=2)
    with pytest.raises(DataError, match=r"rollout\.kept_tokens=2: .* from a set of 3, .*raise rollout\.kept_tokens"):
        read(masked([5, 6], [[5, 9, 1], [6]]), kept_tokens=2)


def test_an_answer_becomes_tokens_logprobs_and_spans():
    found = read(answer([5, 6, 7], [("2", 0, 1), ("3", 1, 3)]))
    assert found.token_ids.tolist() == [5, 6, 7] and found.token_ids.dtype == np.int32
    np.testing.assert_allclose(found.logprobs, [-0.55, -0.56, -0.57], rtol=1e-6)
    assert [(s.policy_version, s.start, s.end) for s in found.spans] == [(2, 0, 1), (3, 1, 3)]
    assert (found.prompt_token_count, found.cached_token_count) == (9, 4)


@pytest.mark.parametrize(("stops", "stopped"), [((7,), True), ((8,), False), ((), False)])
def test_only_the_call_s_own_stop_tokens_stop_it(stops, stopped):
    body = answer([5, 7], finish_reason={"type": "stop", "matched": 7})
    assert read(body, stop_token_ids=stops).stopped is stopped


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


def test_a_logprob_that_is_none_is_an_error_only_where_it_would_be_delivered():
    logprobs = [[-1.0, 1, None], [None, 2, None], [float("nan"), 3, None]]
    found = read(answer([1, 2, 3], [("3", 0, 1), ("4", 1, 3)], output_token_logprobs=logprobs))
    with pytest.raises(EngineError, match="not finite under policy version 4"):
        check_finite(found)
    kept, _ = without(found, {4}, 0)
    check_finite(kept)
    assert kept.token_ids.tolist() == [1]


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


SHAPES = {"model.embed_tokens.weight": [50, 8], "model.norm.weight": [8]}


def write_folder(folder: Path, shapes: dict[str, list[int]] | None = None, **config: object) -> Path:
    folder.mkdir()
    fields = {"vocab_size": 50, "max_position_embeddings": 64, "hidden_size": 8, "model_type": "qwen3"}
    (folder / "config.json").write_text(json.dumps({**fields, **config}))
    header, at = {}, 0
    for name, shape in (SHAPES if shapes is None else shapes).items():
        size = 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + bytes(at))
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 16}, "hidden_size is 16, the running policy has 8"),
        ({"rope_theta": 1e6}, "rope_theta is 1000000.0, the running policy has None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, the running policy has None"),
        ({"hidden_act": "gelu"}, "hidden_act is gelu, the running policy has None"),
        ({"shapes": {"model.norm.weight": [8]}}, "no tensor model.embed_tokens.weight"),
        ({"shapes": {**SHAPES, "model.norm.weight": [7]}}, r"shape \[7\], the running policy has \[8\]"),
        ({"shapes": {**SHAPES, "lm_head.weight": [50, 8]}}, "tensor lm_head.weight, which"),
    ],
)
def test_another_architecture_is_told_by_its_first_difference(tmp_path, changes, message):
    running = read_folder(write_folder(tmp_path / "a"))
    assert re.search(message, difference(running, read_folder(write_folder(tmp_path / "b", **changes))))


def test_rope_scaling_and_rope_parameters_that_differ_are_refused(tmp_path):
    linear = {"rope_type": "linear", "factor": 2.0}
    both = write_folder(tmp_path / "a", rope_scaling=linear, rope_parameters={"rope_type": "default"})
    with pytest.raises(EngineError, match="rope_scaling=.*rope_parameters=.*keep one of them"):
        read_folder(both)
    read_folder(write_folder(tmp_path / "b", rope_scaling=linear, rope_parameters=linear))


def test_damaged_folders_are_engine_errors(tmp_path):
    folder = write_folder(tmp_path / "a")
    data = (folder / "model.safetensors").read_bytes()
    for damaged in (data[:-1], data + b"x", data[:5], b"\xff" * 100, struct.pack("<Q", 4) + b"nope"):
        (folder / "model.safetensors").write_bytes(damaged)
        with pytest.raises(EngineError, match=r"model\.safetensors cannot be read"):
            read_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(EngineError, match="no \\*\\.safetensors"):
        read_folder(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(EngineError, match="expected an object"):
        read_folder(folder)


def make_server_call(name: str = "t") -> ServerCall:
    call = make_call(name, np.arange(5, dtype=np.int32), max_new_token_count=9, chunk_token_count=4)
    return ServerCall(call=call, budget=9, backlog=Backlog.of(call), context=call.context_ids.tolist())


def test_slots_go_out_in_order_of_arrival_and_are_kept_until_the_call_leaves():
    queue = SlotQueue(2)
    first, second, third = (make_server_call(n) for n in "abc")
    for server_call in (first, second, third):
        queue.enter(server_call)
    assert not queue.take(second)
    assert queue.take(first) and queue.take(second) and not queue.take(third)
    status = queue.status()
    assert (status.running_count, status.waiting_count, status.kv_tokens_used) == (2, 1, 10)
    third.changed.clear()
    queue.leave(first)
    assert third.changed.is_set() and queue.take(third)
    assert first.running is False and list(queue) == [second, third]
    queue.leave(second)
    queue.leave(third)
    status = queue.status()
    assert (status.running_count, status.waiting_count) == (0, 0)


@pytest.mark.parametrize(
    ("message", "reported", "unchanged"),
    [
        ("Failed to get weights iterator: no such file.", "4", True),
        ("Failed to get weights iterator: no such file.", "5", False),
        ("Failed to update weights: bad shape.\nRolling back to original weights.", "4", False),
        ("Weights were updated, but the cache was not flushed because requests are still running", "4", False),
    ],
)
def test_only_an_update_that_wrote_nothing_leaves_the_old_weights(message, reported, unchanged):
    assert nothing_changed(message, reported, 4) is unchanged


def test_tokens_of_a_refused_version_and_all_after_them_are_dropped():
    kept, fell = without(piece((0, 3), (1, 2), (0, 4)), {1}, 0)
    assert kept.token_ids.tolist() == [0, 1, 2] and kept.cut and not fell
    kept, fell = without(piece((1, 2), (0, 4), stopped=True), {1}, 0)
    assert len(kept) == 0 and not kept.stopped and not fell


def test_the_versions_of_a_call_never_fall():
    kept, fell = without(piece((1, 3), (0, 2)), set(), 0)
    assert (len(kept), fell) == (3, True)
    kept, fell = without(piece((1, 3)), set(), 2)
    assert (len(kept), fell) == (0, True)
    whole = piece((1, 3), (2, 2))
    assert without(whole, set(), 1) == (whole, False)
