"""Calls, chunks and errors over the wire."""

from __future__ import annotations

import grpc
import grpc.aio
import numpy as np
import pytest

from rollmesh.errors import DataError, EngineError, GenerationRefused
from rollmesh.types import Chunk, FinishReason, GenerationCall, SamplingParams, VersionNeed
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.wire.generation_messages import (
    ERROR_KEY,
    chunk_from_pb,
    chunk_to_pb,
    error_from_rpc,
    request_from_pb,
    request_to_pb,
)

CALL = GenerationCall(
    trajectory_id="e0-3.1",
    group_id="e0-3",
    context_ids=np.array([5, 6, 7], np.int32),
    prompt_token_count=2,
    max_new_token_count=9,
    sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=5, seed=-3, stop_token_ids=(1, 2)),
    chunk_token_count=4,
)


@pytest.mark.parametrize("pinned", [None, 0, 7])
def test_a_call_and_its_need_survive_the_wire(pinned):
    need = VersionNeed(min_version=3, pinned_version=pinned)
    request = pb.GenerateRequest.FromString(request_to_pb(CALL, "me", need).SerializeToString())
    call, found = request_from_pb(request)
    assert (request.instance_id, found) == ("me", need)
    np.testing.assert_array_equal(call.context_ids, CALL.context_ids)
    for name in ("trajectory_id", "group_id", "prompt_token_count", "max_new_token_count", "chunk_token_count"):
        assert getattr(call, name) == getattr(CALL, name)
    assert call.sampling == CALL.sampling


@pytest.mark.parametrize("reason", [None, FinishReason.STOP, FinishReason.INTERRUPTED])
def test_a_chunk_survives_the_wire(reason):
    chunk = Chunk(
        token_ids=np.array([1, 2], np.int32),
        behavior_logprobs=np.array([-0.5, -1.5], np.float32),
        policy_version=4,
        kv_min_version=2,
        finish_reason=reason,
        cached_token_count=12,
    )
    found = chunk_from_pb(pb.GenerateResponse.FromString(chunk_to_pb(chunk).SerializeToString()))
    np.testing.assert_array_equal(found.token_ids, chunk.token_ids)
    np.testing.assert_array_equal(found.behavior_logprobs, chunk.behavior_logprobs)
    for name in ("policy_version", "kv_min_version", "finish_reason", "cached_token_count"):
        assert getattr(found, name) == getattr(chunk, name)


def test_a_malformed_chunk_is_the_generators_fault():
    with pytest.raises(EngineError, match="malformed chunk"):
        chunk_from_pb(pb.GenerateResponse())


def test_a_request_without_tokens_names_the_field():
    with pytest.raises(DataError, match="context_ids"):
        request_from_pb(pb.GenerateRequest())


def rpc_error(code: grpc.StatusCode, kind: str | None) -> grpc.aio.AioRpcError:
    trailing = grpc.aio.Metadata(*([(ERROR_KEY, kind)] if kind else []))
    return grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details="why")


@pytest.mark.parametrize(
    ("code", "kind", "received", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "GenerationRefused", False, GenerationRefused),
        (grpc.StatusCode.INVALID_ARGUMENT, "DataError", False, DataError),
        (grpc.StatusCode.INTERNAL, "EngineError", False, EngineError),
        (grpc.StatusCode.UNAVAILABLE, None, False, EngineError),
        (grpc.StatusCode.INVALID_ARGUMENT, None, False, EngineError),
        (grpc.StatusCode.FAILED_PRECONDITION, "GenerationRefused", True, EngineError),
        (grpc.StatusCode.INTERNAL, "SomethingElse", False, EngineError),
    ],
)
def test_only_a_refusal_on_purpose_and_before_the_first_token_is_one(code, kind, received, expected):
    error = error_from_rpc(rpc_error(code, kind), "host:1", received)
    assert type(error) is expected
    assert "why" in str(error)
