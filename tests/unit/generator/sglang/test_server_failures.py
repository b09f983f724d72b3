"""Reactions of the engine to a server that hangs, restarts, or sends invalid answers."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.engine_protocol import EngineLost, OnNewVersion
from rollmesh.generator.engines.sglang.sglang_engine import SglangEngine
from rollmesh.runtime.tasks import cancel_and_wait
from rollmesh.types import Chunk, FinishReason, GenerationCall, SamplingParams
from rollmesh.worker.active_trajectory import ActiveTrajectory

from ....kit.waiting import reached
from ..served_engine import CallHung, despite_stalls, served
from .scripted_server import LONGEST, VOCAB, ScriptedServer, make_call, make_engine, serving, write_folder

Start = Callable[..., Awaitable[SglangEngine]]


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    scripted = ScriptedServer()
    async with serving(scripted.answer) as scripted.url:
        yield scripted
        scripted.release.set()
        scripted.gate.set()


@pytest.fixture
async def start(server: ScriptedServer, tmp_path: Path) -> AsyncIterator[Start]:
    """``await start(request_timeout_seconds=1)``: an engine on policy version 0 before the scripted server."""
    folder = write_folder(tmp_path / "policy")
    engines: list[SglangEngine] = []

    async def begin(**options: Any) -> SglangEngine:
        engines.append(make_engine(server, **options))
        await engines[-1].start(folder, 0)
        return engines[-1]

    yield begin
    for engine in engines:
        server.deaf = server.deaf_update = False
        server.release.set()
        await engine.aclose()


async def collect(engine: SglangEngine, call: GenerationCall) -> list[Chunk]:
    return [chunk async for chunk in engine.generate(call)]


async def test_drafts_are_counted_from_answers_and_a_server_that_comes_back_without_them_serves_on(server, start):
    server.settings = {"speculative_algorithm": "EAGLE3", "device": "cuda"}
    server.drafts = {"spec_verify_ct": 2, "spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 1}
    engine = await start()
    assert engine.status().speculation is None  # nothing was drafted yet
    chunks = await collect(engine, make_call(count=8))  # two slices of four tokens, the first of each from a prefill
    found = engine.status().speculation
    assert found is not None and sum(len(chunk.token_ids) for chunk in chunks) == 8
    assert (found.drafted_token_total, found.accepted_token_total, found.wasted_token_total) == (12, 2, 10)
    assert (found.row_steps[0], found.row_tokens[0]) == (4, 6)
    server.settings, server.drafts = {}, {}
    again = await start()
    assert sum(len(chunk.token_ids) for chunk in await collect(again, make_call(count=8))) == 8
    assert again.status().speculation is None


async def test_the_deadline_of_a_slice_is_suspended_while_the_server_is_paused(server, start):
    async def attempt(deadline: float) -> None:
        server.deaf, before = True, server.count("/generate")
        server.release.clear()
        engine = await start(request_timeout_seconds=deadline)
        task = asyncio.create_task(collect(engine, make_call(count=4)))
        try:
            await reached(lambda: server.count("/generate") > before)
            await engine.pause()
            if not task.done():  # or the machine stalled, and the deadline came before the pause
                await asyncio.sleep(1.1 * deadline)
                assert not task.done()
            await engine.resume()
            server.release.set()  # at once: a slow machine needs what is left of the time
            assert sum(len(c.token_ids) for c in await task) == 4
        except EngineError as error:
            raise CallHung from error
        finally:
            await cancel_and_wait(task)
            server.gate.set()

    await despite_stalls(attempt)


async def test_a_slice_and_a_pause_of_twice_the_chunk_timeout_cost_no_call_and_no_token(server, start):
    limits = {"vocab_size": VOCAB, "max_context_tokens": LONGEST, "chunk_token_count": 4}

    async def attempt(timeout: float) -> None:
        server.deaf, before = True, server.count("/generate")
        server.release.clear()
        engine = await start()
        async with served(engine, **limits, chunk_timeout_seconds=timeout) as generator:
            worker = await generator.worker()

            async def sample_through_a_pause() -> list[tuple[ActiveTrajectory, FinishReason]]:
                async with asyncio.TaskGroup() as group:
                    sliced = group.create_task(worker.sample("sliced", 4))
                    await reached(lambda: server.count("/generate") > before)
                    await engine.pause()
                    held = group.create_task(worker.sample("held", 4))
                    await reached(lambda: engine.status().waiting_count == 1)
                    await asyncio.sleep(2 * timeout)
                    await engine.resume()
                    server.release.set()
                return [sliced.result(), held.result()]

            try:
                found = await generator.unless_hung(sample_through_a_pause())
            finally:
                await engine.resume()
                server.release.set()
        assert [(active.token_count, reason) for active, reason in found] == [(4, FinishReason.LENGTH)] * 2
        assert (worker.ended("length"), server.count("/generate") - before) == (2, 2)

    await despite_stalls(attempt)


async def test_tokens_of_weights_that_were_never_loaded_end_the_engine(server, start):
    engine = await start()
    server.version = "9"  # it was restarted
    with pytest.raises(EngineLost, match=r"serves policy version 9, which .* has not loaded .*restarted"):
        await collect(engine, make_call())
    with pytest.raises(EngineLost):
        engine.status()


async def test_a_server_that_has_come_back_with_other_weights_is_noticed_without_a_call(server, start):
    engine = await start(probe_seconds=0.05)
    server.version = "default"
    with pytest.raises(EngineLost, match="policy version default"):
        await reached(lambda: engine.status() is None)


async def test_loads_are_not_taken_for_foreign_weights(server, start, tmp_path):
    engine = await start(probe_seconds=0.01)
    for version in range(1, 20):
        await engine.load(tmp_path / "policy", version, OnNewVersion.INTERRUPT)
        await asyncio.sleep(0.01)
    assert engine.status().policy_version == 19


async def test_an_answer_without_a_token_is_an_error_and_not_asked_for_again(server, start):
    engine = await start()
    server.empty = True
    with pytest.raises(EngineError, match="sampled none of 4 tokens after a context of 3"):
        await collect(engine, make_call())
    assert server.count("/generate") == 1


async def test_a_server_that_scores_nothing_is_lost_at_the_deadline(server, start):
    engine = await start(request_timeout_seconds=0.5)
    await engine.pause()
    server.deaf = True
    with pytest.raises(EngineLost, match=r"scored no sequence within generator\.sglang\.request_timeout_seconds=0\.5"):
        await engine.score([np.array([1, 2, 3], np.int32)])
    with pytest.raises(EngineLost):
        engine.status()


async def test_requests_retracted_for_lack_of_cache_are_preemptions_and_those_of_a_pause_are_not(server, start):
    engine = await start()
    server.deaf = True
    call = asyncio.create_task(collect(engine, make_call(count=4)))
    await reached(lambda: server.count("/generate") == 1)
    await engine.pause()
    await engine.resume()
    server.release.set()
    await call
    assert engine.status().preemption_total == 0
    server.deaf, server.retractions = False, 2
    await collect(engine, make_call(count=4))
    assert engine.status().preemption_total == 2


async def test_a_canary_does_not_pause_the_server_again_and_its_tokens_wait_for_the_verdict(server, start, tmp_path):
    engine = await start()
    server.deaf = True
    call = asyncio.create_task(collect(engine, make_call(count=4)))
    await reached(lambda: server.count("/generate") == 1)
    await engine.pause()
    await engine.load(tmp_path / "policy", 1, OnNewVersion.INTERRUPT)
    pauses = server.count("/pause_generation")
    server.deaf = False
    await engine.score([np.array([1, 2, 3], np.int32)])
    assert server.count("/pause_generation") == pauses and server.gate.is_set()
    server.release.set()
    done, _ = await asyncio.wait([call], timeout=0.3)
    assert not done and engine.status().paused
    await engine.resume()
    assert [c.policy_version for c in await call] == [1]


async def test_scoring_leaves_a_paused_server_paused(server, start):
    engine = await start()
    await engine.pause()
    await engine.score([np.array([1, 2, 3], np.int32)])
    assert not server.gate.is_set()


@pytest.mark.parametrize("status", [400, 429, 500, 503])
async def test_a_server_that_refuses_to_score_is_an_engine_error_and_still_serves(server, start, status):
    engine = await start()
    server.status = status
    with pytest.raises(EngineError, match="not now"):
        await engine.score([np.array([1, 2, 3], np.int32)])
    server.status = 200
    assert len((await engine.score([np.array([1, 2, 3], np.int32)]))[0]) == 2


async def test_a_wrong_key_is_an_error_at_once_that_names_the_field(server, start):
    server.key = "another"
    started = time.monotonic()
    with pytest.raises(ConfigError, match=r"generator\.sglang\.admin_key: .* rejects it: .*HTTP 401"):
        await start(start_timeout_seconds=60.0)
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        ({"context_length": 64}, {}, r"--context-length 64; generator.max_context_tokens=64 needs 72"),
        ({"max_total_num_tokens": 70}, {}, r"cache of 70 tokens; generator.max_context_tokens=64 needs 74"),
        ({"max_total_num_tokens": 128, "page_size": 64}, {}, r"cache of 128 tokens; .* needs 200"),
        ({"disable_overlap_schedule": False}, {"on_new_version": "keep_kv"}, "--disable-overlap-schedule"),
    ],
)
async def test_a_server_whose_settings_cannot_serve_the_run_is_refused(server, start, settings, options, message):
    server.settings = settings
    with pytest.raises(ConfigError, match=message):
        await start(**options)


async def test_a_server_that_returns_no_kept_sets_is_refused_where_sampling_is_truncated(server, start):
    with pytest.raises(ConfigError, match=r"rollout\.top_p, top_k and min_p .*does not return .*needs SGLang 0\.5\.23"):
        await start(sampling=SamplingParams(top_p=0.9, kept_tokens=8))
    (check,) = [body for path, body in server.seen if path == "/generate"]
    assert check["return_sampling_mask"] and check["sampling_params"]["top_k"] == 6


async def test_calls_in_progress_end_when_the_server_is_lost_not_at_their_deadline(server, start):
    engine = await start(probe_seconds=0.05, request_timeout_seconds=300.0)
    server.deaf = True
    tasks = [asyncio.create_task(collect(engine, make_call(f"t{i}"))) for i in range(3)]
    await reached(lambda: server.count("/generate") == 3)
    server.version = "9"
    for task in tasks:
        with pytest.raises(EngineLost, match="policy version 9"):
            async with asyncio.timeout(60):
                await task


async def test_an_interrupt_does_not_wait_for_calls_that_were_given_up(server, start):
    engine = await start()
    server.deaf = True
    task = asyncio.create_task(collect(engine, make_call("gone")))
    await reached(lambda: server.count("/generate") == 1)
    interrupt = asyncio.create_task(engine.interrupt(["gone"]))
    await reached(lambda: server.count("/abort_request") == 1)
    await cancel_and_wait(task)
    async with asyncio.timeout(60):
        assert await interrupt == 1


async def test_what_a_cancelled_load_left_behind_is_never_delivered(server, start, tmp_path):
    engine = await start(probe_seconds=0.01)
    server.deaf_update = True
    load = asyncio.create_task(engine.load(tmp_path / "policy", 1, OnNewVersion.INTERRUPT))
    await reached(lambda: server.version == "1")
    await cancel_and_wait(load)
    server.deaf_update = False
    call = asyncio.create_task(collect(engine, make_call()))
    await reached(lambda: server.count("/generate") >= 2)
    await engine.interrupt()
    (end,) = await call
    assert (end.finish_reason, len(end.token_ids)) == (FinishReason.INTERRUPTED, 0)
    server.release.set()
    await engine.load(tmp_path / "policy", 1, OnNewVersion.INTERRUPT)
    assert {c.policy_version for c in await collect(engine, make_call())} == {1}
