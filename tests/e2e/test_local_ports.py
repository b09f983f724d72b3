"""Every user of a machine reaches the loopback ports of a run: without its token they can do nothing there."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

import grpc
import grpc.aio
import pytest

from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import generation_service_pb2_grpc as generation_stubs
from rollmesh.v1 import reward_service_pb2 as reward
from rollmesh.v1 import reward_service_pb2_grpc as reward_stubs

from .conftest import ENDLESS, WAIT_SECONDS


async def refused(call: Awaitable[object]) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def call_without_token(generator: Endpoint, scorer: Endpoint) -> None:
    async with create_channel(generator.grpc) as channel:
        stub = generation_stubs.GenerationServiceStub(channel)
        await refused(stub.Pause(generation.PauseRequest()))
        await refused(stub.Drain(generation.DrainRequest()))
    async with create_channel(scorer.grpc) as channel:
        await refused(reward_stubs.RewardServiceStub(channel).Score(reward.ScoreRequest()).read())


async def drain(generator: Endpoint, token: str) -> None:
    async with create_channel(generator.grpc) as channel:
        stub = generation_stubs.GenerationServiceStub(channel)
        await stub.Drain(generation.DrainRequest(), metadata=call_metadata(token=token))


def test_loopback_ports_need_the_token_of_the_run_and_a_drained_generator_comes_back(started, wait_until) -> None:
    line, process = started(trainer={"train_steps": ENDLESS}, generator={"replicas": 1})

    def generator_pids() -> list[int]:
        return [endpoint.pid for endpoint in read_endpoints(line.folder, "generator")]

    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 1, "a train step", process)
    (before,), (scorer,) = (read_endpoints(line.folder, name) for name in ("generator", "reward"))
    asyncio.run(call_without_token(before, scorer))
    asyncio.run(drain(before, (line.folder / "mesh-token").read_text().strip()))
    wait_until(lambda: generator_pids() not in ([], [before.pid]), "another generator", process)
    trained = len(line.json_lines("metrics.jsonl"))
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) > trained + 1, "further train steps", process)
    process.terminate()
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert "generator-0 ended with status 0, restart 1 of 20" in output
