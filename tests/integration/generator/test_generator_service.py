"""Generators over real gRPC with a real registry and real policy folders."""

import asyncio
import math
import signal
from dataclasses import replace

import grpc.aio
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.errors import DataError, EngineError, GenerationRefused
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.grpc import create_channel
from rollmesh.types import FinishReason
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs

from ...kit.generation import prompt_ids
from .generator_run import SLOW, SLOWEST, Stream, make_call, raw_request


async def test_a_generator_follows_announced_policies_and_skips_to_the_newest(make_run):
    run = await make_run()
    generator = run.start()
    await run.until_live("a registration", lambda live: len(live) == 1)
    assert not (await run.store.generators.live())[0].serving
    for version in range(4):
        await run.publish(version)
    (record,) = await run.serving(3)
    stream = run.stream(record, make_call())
    await stream.end()
    assert stream.versions == {3}
    stream.check_pure(run.models)
    assert await run.metric("rollmesh_generator_policy_version") == 3
    assert await run.metric("rollmesh_generator_generated_tokens_total") == 150
    assert await run.metric("rollmesh_generator_reload_bytes_total") > 10_000
    await run.until_live("a heartbeat that tells what it did", _worked)
    await generator.stop()
    assert await run.store.generators.live() == []


def _worked(live):
    (work,) = (record.work for record in live)
    slots_used = 0 < work.running_slot_seconds < work.slot_seconds
    return work.generated_tokens == 150 and work.prefill_tokens >= 11 and slots_used


@pytest.mark.parametrize("mode", ["interrupt", "keep_kv", "drain"])
async def test_a_new_version_meets_running_calls_as_the_run_says(make_run, mode):
    run = await make_run(pace=SLOWEST, on_new_version=mode)
    record = await run.begin()
    newer = await run.prepare(1)
    stream = await run.under_way(record, make_call())
    await run.announce(newer)
    reason = await stream.end()
    await run.serving(1)
    if mode == "interrupt":
        assert (reason, stream.versions) == (FinishReason.INTERRUPTED, {0})
    elif mode == "drain":
        assert (reason, stream.versions) == (FinishReason.LENGTH, {0})
    else:
        assert (reason, stream.versions) == (FinishReason.LENGTH, {0, 1})
        assert {c.kv_min_version for c in stream.chunks} == {0}
    fresh = run.stream(record, make_call("fresh", max_new_token_count=10), min_version=1)
    await fresh.end()
    assert fresh.stamps == {(1, 1)}


async def test_the_registry_tells_how_full_the_cache_is_and_how_often_it_was_too_small(make_run):
    run = await make_run(pace=SLOW, slots=4, max_context_tokens=220, kv_token_capacity=440)
    record = await run.begin()
    assert (record.kv_tokens_used, record.preemption_total, record.kv_token_capacity) == (0, 0, 440)
    # What admission expects of these calls is too little: it has seen nothing but short responses.
    short = [run.stream(record, make_call(f"s{n}", max_new_token_count=20)) for n in range(4)]
    await asyncio.gather(*(stream.end() for stream in short))
    calls: list[Stream] = []

    async def told() -> bool:
        # On a machine that stalls, no heartbeat may have met the last ones: then the cache is filled again.
        if all(stream.task.done() for stream in calls):
            long = [make_call(f"t{len(calls) + n}", prompt_ids(n, 8), max_new_token_count=180) for n in range(4)]
            calls.extend(run.stream(record, call) for call in long)
        (found,) = await run.store.generators.live()
        return found.preemption_total > 0 and found.waiting_count > 0 and 0 < found.kv_tokens_used <= 440

    await run.until("a heartbeat with a full cache", told)
    assert {await stream.end() for stream in calls} == {FinishReason.LENGTH}


async def test_a_generator_that_drains_for_a_reload_refuses_calls_instead_of_holding_them(make_run):
    run = await make_run(pace=SLOWEST, on_new_version="drain")
    record = await run.begin()
    newer = await run.prepare(1)
    stream = await run.under_way(record, make_call(max_new_token_count=200))
    await run.announce(newer)
    await run.out_of_rotation("reload")
    with pytest.raises(GenerationRefused, match="waiting for running calls"):
        await run.stream(record, make_call("late")).end()
    (waiting,) = await run.store.generators.live()
    assert (waiting.policy_version, waiting.loading_version) == (0, 1), "the trainer must prune neither"
    assert not stream.task.done()
    await run.client.interrupt(record, ["t"])
    assert await stream.end() is FinishReason.INTERRUPTED, "it need not take its 12 seconds"
    (after,) = await run.serving(1)
    assert after.loading_version is None


async def test_a_pinned_version_is_served_until_it_is_unpinned(make_run):
    run = await make_run()
    await run.publish(0)
    await run.publish(1)
    run.start()
    (record,) = await run.serving(1)
    await run.store.policies.pin(0)
    await run.serving(0)
    pinned = run.stream(record, make_call(), pinned_version=0)
    await pinned.end()
    assert pinned.versions == {0}
    with pytest.raises(GenerationRefused, match="pinned policy version 1"):
        await run.stream(record, make_call(), pinned_version=1).end()
    await run.store.policies.pin(None)
    await run.serving(1)


async def test_wrong_calls_and_wrong_addressees_get_their_own_errors(make_run):
    run = await make_run(slots=1, pace=SLOW)
    record = await run.begin()
    with pytest.raises(DataError, match=r"context_ids\[0\]=99"):
        await run.stream(record, make_call(context=np.array([99], np.int32))).end()
    with pytest.raises(DataError, match="context_ids: 256 tokens"):
        await run.stream(record, make_call(context=prompt_ids(0, 256))).end()
    with pytest.raises(GenerationRefused, match="instance_id=gone"):
        await run.stream(replace(record, instance_id="gone"), make_call()).end()
    with pytest.raises(GenerationRefused, match="min_policy_version=4"):
        await run.stream(record, make_call(), min_version=4).end()
    running = await run.under_way(record, make_call("running"))
    waiting = run.stream(record, make_call("waiting"))
    await run.until_status(record, "a full generator", lambda status: status.waiting_count == 1)
    with pytest.raises(GenerationRefused, match="1 calls wait for 1 slots"):
        await run.stream(record, make_call("surplus")).end()
    assert await run.client.interrupt(record, ["running", "waiting"]) == 2, "both go on"
    for stream in (running, waiting):
        assert await stream.end() is FinishReason.INTERRUPTED


ABSURD = (
    {"max_new_token_count": 0},
    {"chunk_token_count": -1},
    {"prompt_token_count": 2**31 - 1},
    {"trajectory_id": "x" * 100_000},
    {"min_policy_version": -(2**62)},
    {"unacknowledged_token_limit": -1},
    *({"sampling": {"temperature": value, "top_p": 1.0}} for value in (1e-300, -1.0, math.nan, math.inf)),
    {"sampling": {"temperature": 1.0, "top_p": 1.0, "stop_token_ids": [2**31 - 1]}},
)


async def test_codes_on_the_wire_are_the_canonical_ones(make_run):
    run = await make_run()
    record = await run.begin()
    async with create_channel(record.address) as channel:
        stub = stubs.GenerationServiceStub(channel)
        for request, code in (
            (pb.GenerateRequest(instance_id="other"), grpc.StatusCode.INVALID_ARGUMENT),
            (raw_request("other"), grpc.StatusCode.FAILED_PRECONDITION),
            *((raw_request(record.instance_id, **each), grpc.StatusCode.INVALID_ARGUMENT) for each in ABSURD),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Generate(request).read()
            assert caught.value.code() is code
        with pytest.raises(grpc.aio.AioRpcError, match="policy_version=7"):
            await stub.LoadPolicy(pb.LoadPolicyRequest(policy_version=7))
        many = pb.InterruptRequest(trajectory_ids=[f"t{number}" for number in range(100_000)])
        malformed = channel.unary_unary("/rollmesh.v1.GenerationService/Pause")(b"\xff\xff\xff")
        for call in (stub.Interrupt(many), malformed):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        health = health_pb2_grpc.HealthStub(channel)
        answer = await health.Check(health_pb2.HealthCheckRequest(service="rollmesh.v1.GenerationService"))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert (await stub.Drain(pb.DrainRequest())).interrupted_count == 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Generate(raw_request(record.instance_id)).read()
        # A server that stops meanwhile cancels the call.
        assert caught.value.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


async def test_pause_and_resume_over_the_wire_hold_a_stream(make_run):
    run = await make_run(pace=SLOW)
    record = await run.begin()
    newer = await run.prepare(1)
    stream = await run.under_way(record, make_call())
    async with create_channel(record.address) as channel:
        stub = stubs.GenerationServiceStub(channel)
        await stub.Pause(pb.PauseRequest())
        assert (await run.client.status(record)).paused
        await run.announce(newer)
        await run.serving(1)
        assert (await run.client.status(record)).paused
        assert await stream.end() is FinishReason.INTERRUPTED
        held = run.stream(record, make_call("held", max_new_token_count=10))
        await run.until_status(record, "a held call", lambda status: status.waiting_count == 1)
        await stub.Resume(pb.ResumeRequest())
        assert await held.end() is FinishReason.LENGTH


async def test_sigterm_ends_streams_as_interrupted_and_kill_as_an_error_and_the_rest_continues_elsewhere(make_run):
    # The signals meet calls of twelve seconds, however late they come; the entry of the killed one must end.
    run = await make_run(pace=[[1, 0.08]], session_ttl_seconds=15.0)
    await run.publish(0)
    processes = [run.start_process(index, fresh=True) for index in range(2)]
    run.start(index=2, pace=None)
    by_address = {e.grpc: e.index for e in await _endpoints(run, 3)}
    records = {by_address[r.address]: r for r in await run.serving(0, count=3)}
    calls = {index: make_call(f"t{index}", prompt_ids(index)) for index in range(2)}
    # Both at once: the first one could be through while the second generator computes its first tokens.
    streams = await asyncio.gather(*(run.under_way(records[index], calls[index]) for index in range(2)))
    processes[0].send_signal(signal.SIGTERM)
    processes[1].kill()
    assert await streams[0].end() is FinishReason.INTERRUPTED
    with pytest.raises(EngineError, match="UNAVAILABLE"):
        await streams[1].end()
    wholes = [run.stream(records[2], call) for call in calls.values()]
    rests = []
    for index, stream in enumerate(streams):
        assert len(stream.tokens) > 0
        rest_call = replace(
            calls[index],
            context_ids=stream.ids,
            max_new_token_count=150 - len(stream.tokens),
        )
        rests.append(run.stream(records[2], rest_call))
    for stream, whole, rest in zip(streams, wholes, rests, strict=True):
        assert await whole.end() is FinishReason.LENGTH
        await rest.end()
        np.testing.assert_array_equal(np.concatenate((stream.tokens, rest.tokens)), whole.tokens)
    assert await asyncio.to_thread(processes[0].wait, 60) == 0
    living = [records[2].instance_id]
    await run.until_live("the dead to leave the registry", lambda live: [g.instance_id for g in live] == living)


async def _endpoints(run, count):
    async def there() -> bool:
        return len(read_endpoints(run.folder, "generator")) == count

    await run.until(f"{count} endpoints", there)
    return read_endpoints(run.folder, "generator")
