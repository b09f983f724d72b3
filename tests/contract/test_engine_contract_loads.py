"""Contract of every generation engine for changes of its weights; the same cases on each."""

import asyncio
import shutil

import numpy as np
import pytest

from rollmesh.errors import ConfigError, EngineError
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.types import FinishReason

from ..kit.generation import Running, collect, hf_logprobs, make_call, prompt_ids, start_calls
from ..kit.waiting import reached
from .contract_kit import WAIT_SECONDS, hf_mixed_logprobs, write_model, write_nan


def _truncate(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])


def _no_weights(folder):
    (folder / "model.safetensors").unlink()


def _other_model(folder):
    shutil.rmtree(folder)
    write_model(folder, 9, hidden_size=32)


async def test_an_interrupting_load_leaves_every_token_pure(make, models):
    engine = await make()
    running = await start_calls(engine, 3)
    seconds = await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    assert 0 <= seconds < WAIT_SECONDS
    for rollout in await running.end():
        rollout.check_pure(models)
        if make.retracts:
            assert (set(rollout.versions), rollout.reason) == ({0, 1}, FinishReason.LENGTH)
        else:
            assert (set(rollout.versions), rollout.reason) == ({0}, FinishReason.INTERRUPTED)
        assert rollout.versions == sorted(rollout.versions)
    assert engine.status().preemption_total == 0, "a load is no lack of cache"
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(1, 1)}
    fresh.check_pure(models)


async def test_an_interrupting_load_may_end_running_calls(make, models):
    engine = await make(interrupt="abort") if make.retracts else await make()
    running = await start_calls(engine, 3)
    await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    for rollout in await running.end():
        assert (set(rollout.versions), rollout.reason) == ({0}, FinishReason.INTERRUPTED)
        rollout.check_pure(models)
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(1, 1)}
    fresh.check_pure(models)


async def test_a_load_that_keeps_the_cache_stamps_it_and_every_logprob_is_of_both(make, models):
    if make.overlaps:  # the token in flight during the swap would get the wrong stamp
        with pytest.raises(ConfigError, match="--disable-overlap-schedule"):
            await make(on_new_version="keep_kv")
        return
    engine = await make()
    running = await start_calls(engine, 3)
    await engine.load(models[1], 1, OnNewVersion.KEEP_KV)
    await reached(lambda: all(1 in r.versions or t.done() for r, t in running.pairs()))
    await engine.load(models[2], 2, OnNewVersion.KEEP_KV)
    for rollout in await running.end():
        assert (len(rollout.tokens), rollout.reason) == (200, FinishReason.LENGTH)
        assert rollout.versions == sorted(rollout.versions) and set(rollout.versions) == {0, 1, 2}
        assert rollout.stamps == {(0, 0), (1, 0), (2, 0)}
        wanted = hf_mixed_logprobs(models, rollout.call.context_ids, rollout.chunks)
        np.testing.assert_allclose(rollout.logprobs, wanted, atol=1e-4)


async def test_what_an_interrupting_load_computes_again_is_counted(make, models):
    engine = await make()
    running = await start_calls(engine, 3)
    await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    rollouts = await running.end()
    if not make.retracts:  # the calls ended; their next generator prefills again
        assert engine.status().reprefill_token_total == 0
        rests = [make_call(r.call.trajectory_id, r.ids, prompt_token_count=8, max_new_token_count=4) for r in rollouts]
        await asyncio.gather(*(collect(engine, call) for call in rests))
        # The last token of a context is the input of the first decode step.
        wanted = sum(len(r.tokens) - 1 for r in rollouts)
    else:
        before = [sum(len(c.token_ids) for c in r.chunks if c.policy_version == 0) for r in rollouts]
        wanted = sum(count - 1 for count in before)
    counted, rounds = engine.status().reprefill_token_total, 200 // 8 * 3
    # A slice more computes the last token of the one before it again.
    assert wanted <= counted <= wanted + rounds
    assert engine.status().prefill_token_total >= counted


async def test_after_a_kept_cache_no_new_call_sees_the_cache_of_the_old_version(engine, models):
    context = prompt_ids(1, 30)
    old = await Running(engine, [make_call("old", context, max_new_token_count=200)]).begun()
    await engine.load(models[1], 1, OnNewVersion.KEEP_KV)
    new = await collect(engine, make_call("new", context))
    assert new.stamps == {(1, 1)}
    new.check_pure(models)
    assert (await old.end())[0].reason is FinishReason.LENGTH


async def test_a_draining_load_waits_for_running_calls_and_goes_before_waiting_ones(make, models):
    engine = await make(slots=2)
    running = await start_calls(engine, 2)
    load = asyncio.create_task(engine.load(models[1], 1, OnNewVersion.DRAIN))
    waiting = Running(engine, [make_call(f"w{i}") for i in range(3)])
    await load
    for rollout in await running.end():
        assert (rollout.stamps, rollout.reason) == ({(0, 0)}, FinishReason.LENGTH)
        rollout.check_pure(models)
    for rollout in await waiting.end():
        assert rollout.stamps == {(1, 1)}
        rollout.check_pure(models)


async def test_loads_follow_each_other_in_order(engine, models):
    await start_calls(engine, 2)
    modes = (OnNewVersion.KEEP_KV, OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV)
    await asyncio.gather(*(engine.load(models[i], i, mode) for i, mode in enumerate(modes, start=1)))
    assert engine.status().policy_version == 3
    (scores,) = await engine.score([prompt_ids(0, 30)])
    np.testing.assert_allclose(scores, hf_logprobs(models[3], prompt_ids(0, 30)), atol=1e-4)


@pytest.mark.parametrize("mode", [OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV])
async def test_weights_that_fail_their_trial_leave_no_token_behind(engine, models, mode):
    running = await start_calls(engine, 3)
    await engine.pause()
    await engine.load(models[1], 1, mode)
    (scores,) = await engine.score([prompt_ids(5, 40)])
    np.testing.assert_allclose(scores, hf_logprobs(models[1], prompt_ids(5, 40)), atol=1e-4)
    await engine.load(models[0], 0, mode)
    await engine.resume()
    for rollout in await running.end():
        assert set(rollout.versions) == {0}
        if rollout.stamps == {(0, 0)}:
            rollout.check_pure(models)
        assert rollout.reason in (FinishReason.LENGTH, FinishReason.INTERRUPTED)
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(0, 0)}
    fresh.check_pure(models)


async def test_weights_that_are_not_numbers_fail_their_trial_and_leave_every_call_alone(engine, models, tmp_path):
    folder = tmp_path / "policy"
    shutil.copytree(models[1], folder)
    write_nan(folder)
    running = await start_calls(engine, 3)
    await engine.pause()
    await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    (scores,) = await engine.score([prompt_ids(5, 40)])
    assert not np.isfinite(scores).any()
    await engine.load(models[0], 0, OnNewVersion.INTERRUPT)
    await engine.resume()
    for rollout in await running.end():
        assert rollout.reason in (FinishReason.LENGTH, FinishReason.INTERRUPTED)
        rollout.check_pure(models)
        assert set(rollout.versions) == {0}
    (await collect(engine, make_call("fresh"))).check_pure(models)


async def test_weights_that_pass_their_trial_go_into_service_with_resume(make, models):
    engine = await make()
    running = await start_calls(engine, 3)
    await engine.pause()
    before = [len(r.chunks) for r in running.rollouts]
    await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    await engine.score([prompt_ids(5, 40)])
    assert all(1 not in r.versions for r in running.rollouts) and len(before) == 3
    await engine.resume()
    for rollout in await running.end():
        rollout.check_pure(models)
        assert (1 in rollout.versions) == make.retracts


async def test_the_versions_of_a_call_never_fall(engine, models):
    await engine.load(models[1], 1, OnNewVersion.KEEP_KV)
    running = await start_calls(engine, 3)
    await engine.load(models[0], 0, OnNewVersion.INTERRUPT)
    for rollout in await running.end():
        assert (set(rollout.versions), rollout.reason) == ({1}, FinishReason.INTERRUPTED)
        rollout.check_pure(models)
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(0, 0)}
    fresh.check_pure(models)


async def test_a_version_that_falls_and_rises_again_under_running_calls_ends_them(engine, models):
    await engine.load(models[1], 1, OnNewVersion.KEEP_KV)
    running = await start_calls(engine, 3)
    await engine.load(models[0], 0, OnNewVersion.KEEP_KV)
    await reached(lambda: all(task.done() or 0 in rollout.versions for rollout, task in running.pairs()))
    await engine.load(models[1], 1, OnNewVersion.KEEP_KV)
    for rollout in await running.end():
        assert (set(rollout.versions), rollout.reason) == ({1}, FinishReason.INTERRUPTED)
        rollout.check_pure(models)


@pytest.mark.parametrize("damage", [_truncate, _no_weights, _other_model])
async def test_a_folder_that_cannot_be_served_is_refused_and_the_old_weights_still_serve(
    engine, models, tmp_path, damage
):
    running = await start_calls(engine, 2)
    folder = tmp_path / "policy"
    shutil.copytree(models[1], folder)
    damage(folder)
    with pytest.raises(EngineError):
        await engine.stage(folder, 1)
    with pytest.raises(EngineError):
        await engine.load(folder, 1, OnNewVersion.INTERRUPT)
    for rollout in await running.end():
        assert (set(rollout.versions), rollout.reason) == ({0}, FinishReason.LENGTH)
        rollout.check_pure(models)
    assert engine.status().policy_version == 0


async def test_an_update_among_32_running_calls_leaves_no_token_with_the_wrong_version(make, models):
    engine = await make(slots=32)
    running = await start_calls(engine, 32, max_new_token_count=60)
    await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    rollouts = await running.end()
    seen = {version for rollout in rollouts for version in rollout.versions}
    assert seen == ({0, 1} if make.retracts else {0})
    for rollout in rollouts:
        rollout.check_pure(models)
    assert engine.status().policy_version == 1
