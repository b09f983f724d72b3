"""Absurd values and malformed messages at the generator's port: a clear refusal each, one line in the log each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import grpc
import pytest

from rollmesh.runtime.grpc import create_channel
from rollmesh.types import FinishReason
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs

from .generator_run import make_call, raw_request

SERVICE = "/rollmesh.v1.GenerationService/"
METHODS = ("Generate", "Interrupt", "Acknowledge", "LoadPolicy", "Pause", "Resume", "Drain", "GetStatus")
INT32, INT64 = 2**31 - 1, 2**63 - 1
WRONG_CALLS: dict[str, dict[str, Any]] = {
    "temperature below float32": {"sampling": {"temperature": 1e-300, "top_p": 1.0}},
    "negative temperature": {"sampling": {"temperature": -1.0, "top_p": 1.0}},
    "temperature nan": {"sampling": {"temperature": math.nan, "top_p": 1.0}},
    "temperature inf": {"sampling": {"temperature": math.inf, "top_p": 1.0}},
    "top_p 0": {"sampling": {"temperature": 1.0, "top_p": 0.0}},
    "top_p nan": {"sampling": {"temperature": 1.0, "top_p": math.nan}},
    "negative top_k": {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1}},
    "min_p 1": {"sampling": {"temperature": 1.0, "top_p": 1.0, "min_p": 1.0}},
    "min_p nan": {"sampling": {"temperature": 1.0, "top_p": 1.0, "min_p": math.nan}},
    "negative kept_tokens": {"sampling": {"temperature": 1.0, "top_p": 1.0, "kept_tokens": -1}},
    "foreign stop token": {"sampling": {"temperature": 1.0, "top_p": 1.0, "stop_token_ids": [INT32]}},
    "no new tokens": {"max_new_token_count": -INT32},
    "no tokens a chunk": {"chunk_token_count": -1},
    "prompt longer than the context": {"prompt_token_count": INT32},
    "long trajectory id": {"trajectory_id": "x" * 100_000},
    "long group id": {"group_id": "x" * 100_000},
    "negative min version": {"min_policy_version": -(2**62)},
    "negative pinned version": {"pinned_policy_version_plus_one": -(2**62)},
    "negative backlog": {"unacknowledged_token_limit": -INT32},
}
ALLOWED_CALLS: dict[str, dict[str, Any]] = {
    "huge temperature": {"sampling": {"temperature": 1e300, "top_p": 1.0}},
    "tiny top_p": {"sampling": {"temperature": 1.0, "top_p": 1e-300}},
    "huge top_k": {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": INT32}},
    "huge kept_tokens": {"sampling": {"temperature": 1.0, "top_p": 0.9, "kept_tokens": INT32}},
    "huge seed": {"sampling": {"temperature": 1.0, "top_p": 1.0, "seed": -INT64 - 1}},
    "huge budget": {"max_new_token_count": INT32, "chunk_token_count": INT32},
    "huge backlog": {"unacknowledged_token_limit": INT32},
}


async def code_of(call: Any) -> grpc.StatusCode:
    """The status that a call ends with."""
    try:
        await (call.read() if hasattr(call, "read") else call)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_absurd_values_are_invalid_arguments_and_the_generator_still_serves(
    make_run: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run = await make_run()
    record = await run.begin()
    codes = {}
    async with create_channel(record.address) as channel:
        stub = stubs.GenerationServiceStub(channel)
        for name, changes in WRONG_CALLS.items():
            codes[name] = await code_of(stub.Generate(raw_request(record.instance_id, **changes)))
        for version in (2**62, -1, -(2**63), INT64):
            call = stub.LoadPolicy(pb.LoadPolicyRequest(policy_version=version))
            codes[f"LoadPolicy {version}"] = await code_of(call)
        acknowledge = pb.AcknowledgeRequest(instance_id="x" * 100_000)
        # The refusal names the value; a client gets no status that is longer than its metadata may be.
        assert await code_of(stub.Acknowledge(acknowledge)) is grpc.StatusCode.FAILED_PRECONDITION
        many = pb.InterruptRequest(trajectory_ids=[f"t{number}" for number in range(100_000)])
        codes["Interrupt of 100,000"] = await code_of(stub.Interrupt(many))
        for method in METHODS:
            kind = channel.unary_stream if method == "Generate" else channel.unary_unary
            codes[f"malformed {method}"] = await code_of(kind(SERVICE + method)(b"\xff\xff\xff"))
        wrong = {name: code for name, code in codes.items() if code is not grpc.StatusCode.INVALID_ARGUMENT}
        assert wrong == {}
        for name, changes in ALLOWED_CALLS.items():
            chunks = [chunk async for chunk in stub.Generate(raw_request(record.instance_id, **changes))]
            assert chunks[-1].finish_reason, name
    assert await run.stream(record, make_call()).end() is FinishReason.LENGTH
    assert "Traceback" not in capsys.readouterr().out
