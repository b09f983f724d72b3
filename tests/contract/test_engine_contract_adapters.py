"""Contract of every generation engine for adapters above one base; the same cases on each."""

import asyncio
import shutil

import numpy as np
import pytest

from rollmesh.errors import EngineError
from rollmesh.generator.engines import call_limits
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.types import FinishReason

from ..kit.adapters import change_tensors, write_adapter
from ..kit.generation import Running, collect, hf_logprobs, make_call, prompt_ids, start_calls
from ..kit.waiting import reached
from .contract_kit import WAIT_SECONDS, hf_greedy

_TENSOR = "base_model.model.model.layers.0.self_attn.v_proj.lora_B.weight"


async def serve(engine, adapters, version):
    """Load a version as the policy watcher does."""
    await engine.stage(adapters[version], version)
    await engine.load(adapters[version], version, OnNewVersion.NEXT_SLICE)


async def check_scores(engine, merged, version, ids):
    (scores,) = await engine.score([ids], version)
    np.testing.assert_allclose(scores, hf_logprobs(merged[version], ids), atol=2e-4)


async def test_the_base_and_an_adapter_compute_what_their_merged_weights_compute(adapter_make, adapters, merged):
    engine = await adapter_make()
    for version in (0, 1):
        await serve(engine, adapters, version)
        assert engine.status().policy_version == version
        await check_scores(engine, merged, version, prompt_ids(5, 40))
        sampled = [await collect(engine, make_call(temperature=t)) for t in (1.0, 0.7)]
        greedy = await collect(engine, make_call("greedy", temperature=0.0))
        np.testing.assert_array_equal(greedy.tokens, hf_greedy(merged[version], greedy.call.context_ids, 40))
        for rollout in (*sampled, greedy):
            assert rollout.stamps == {(version, version)}
            rollout.check_pure(merged)


async def test_running_calls_go_on_while_newer_versions_are_loaded_and_every_token_is_of_its_version(
    adapter_make, adapters, merged, monkeypatch
):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", WAIT_SECONDS)
    engine = await adapter_make()
    running = []
    context = prompt_ids(1, 30)  # one for all: a cache shared between versions would show
    for version in range(5):
        if version:
            await serve(engine, adapters, version)
        # The limit holds a call half-way until the last version is loaded.
        call = make_call(f"v{version}", context, max_new_token_count=200, unacknowledged_token_limit=104)
        running.append(await Running(engine, [call]).begun())
    ended = await asyncio.gather(*(one.end_saved(engine) for one in running))
    for version, (rollout,) in enumerate(ended):
        assert (len(rollout.tokens), rollout.reason) == (200, FinishReason.LENGTH)
        assert rollout.versions[0] == version and rollout.versions == sorted(rollout.versions)
        if adapter_make.kind == "torch":
            assert set(rollout.versions) == {version}
        rollout.check_pure(merged)
    # A slice that began later names the newest version.
    if adapter_make.kind != "torch":
        assert ended[0][0].versions[-1] == 4


async def test_a_version_is_scored_beside_running_calls_before_any_token_is_of_it(adapter_make, adapters, merged):
    engine = await adapter_make()
    await serve(engine, adapters, 1)
    running = await start_calls(engine, 3)
    await engine.stage(adapters[2], 2)
    for version in (0, 1, 2):
        await check_scores(engine, merged, version, prompt_ids(5, 40))
    chunks = [len(rollout.chunks) for rollout in running.rollouts]
    await reached(lambda: all(len(r.chunks) > n or t.done() for n, (r, t) in zip(chunks, running.pairs(), strict=True)))
    assert engine.status().policy_version == 1
    (scores,) = await engine.score([prompt_ids(5, 40)])
    np.testing.assert_allclose(scores, hf_logprobs(merged[1], prompt_ids(5, 40)), atol=2e-4)
    rollouts = await running.end()
    rollouts.append(await collect(engine, make_call("fresh")))
    for rollout in rollouts:
        assert rollout.stamps == {(1, 1)}
        rollout.check_pure(merged)
    await engine.load(adapters[2], 2, OnNewVersion.NEXT_SLICE)
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(2, 2)}
    fresh.check_pure(merged)


async def test_after_a_return_to_an_older_version_running_calls_finish_on_theirs(adapter_make, adapters, merged):
    engine = await adapter_make()
    await serve(engine, adapters, 1)
    await serve(engine, adapters, 2)
    running = await start_calls(engine, 3)
    for older in (1, 0):
        await serve(engine, adapters, older)
        fresh = await collect(engine, make_call("fresh"))
        assert fresh.stamps == {(older, older)}
        fresh.check_pure(merged)
    for rollout in await running.end():
        assert (rollout.stamps, rollout.reason) == ({(2, 2)}, FinishReason.LENGTH)
        rollout.check_pure(merged)


async def test_old_versions_make_room_and_may_return(adapter_make, adapters, merged):
    engine = await adapter_make()
    for version in range(1, 6):
        await serve(engine, adapters, version)
    for kept in (3, 4, 5):
        await check_scores(engine, merged, kept, prompt_ids(5, 40))
    for dropped in (1, 2):
        with pytest.raises(EngineError, match=f"policy version {dropped} is not loaded"):
            await engine.score([prompt_ids(0)], dropped)
    await serve(engine, adapters, 1)
    fresh = await collect(engine, make_call("fresh"))
    assert fresh.stamps == {(1, 1)}
    fresh.check_pure(merged)


async def test_an_adapter_that_failed_its_canary_is_read_again(adapter_make, adapters, merged, tmp_path):
    engine = await adapter_make()
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[2], folder)  # of another version than its name says
    await engine.stage(folder, 1)
    (scores,) = await engine.score([prompt_ids(5, 40)], 1)
    assert np.abs(scores - hf_logprobs(merged[1], prompt_ids(5, 40))).max() > 0.1
    await serve(engine, adapters, 1)
    await check_scores(engine, merged, 1, prompt_ids(5, 40))
    (await collect(engine, make_call("fresh"))).check_pure(merged)


def _other_rank(folder, base):
    write_adapter(folder, base, 9, rank=8)


def _half(folder, base):
    change_tensors(folder, {_TENSOR: None})


def _truncated(folder, base):
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def _full_weights(folder, base):
    shutil.rmtree(folder)
    shutil.copytree(base, folder)


@pytest.mark.parametrize("damage", [_other_rank, _half, _truncated, _full_weights])
async def test_a_folder_that_is_no_adapter_of_the_run_is_refused_and_the_old_version_still_serves(
    adapter_make, adapters, merged, tmp_path, damage
):
    engine = await adapter_make()
    await serve(engine, adapters, 1)
    running = await start_calls(engine, 2)
    folder = tmp_path / "adapter"
    shutil.copytree(adapters[2], folder)
    damage(folder, adapters[0])
    with pytest.raises(EngineError, match=str(folder)):
        await engine.stage(folder, 2)
    with pytest.raises(EngineError, match=str(folder)):
        await engine.load(folder, 2, OnNewVersion.NEXT_SLICE)
    for rollout in await running.end():
        assert (rollout.stamps, rollout.reason) == ({(1, 1)}, FinishReason.LENGTH)
        rollout.check_pure(merged)
    assert engine.status().policy_version == 1


@pytest.mark.parametrize("mode", [OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV, OnNewVersion.DRAIN])
async def test_what_full_weights_do_to_running_calls_is_refused_by_name(adapter_make, adapters, mode):
    engine = await adapter_make()
    with pytest.raises(EngineError, match=f"generator.on_new_version={mode}: an engine with model.adapter cannot"):
        await engine.load(adapters[1], 1, mode)


async def test_three_versions_in_a_row_among_32_running_calls_leave_no_token_with_the_wrong_version(
    adapter_make, adapters, merged
):
    engine = await adapter_make(slots=32)
    running = await start_calls(engine, 32, max_new_token_count=60)
    for version in (1, 2, 3):
        await serve(engine, adapters, version)
    rollouts = await running.end()
    late = await asyncio.gather(*(collect(engine, make_call(f"l{i}", prompt_ids(i))) for i in range(8)))
    for rollout in (*rollouts, *late):
        assert rollout.reason is FinishReason.LENGTH
        rollout.check_pure(merged)
    assert {version for rollout in late for version in rollout.versions} == {3}
    assert engine.status().preemption_total == 0


async def test_a_paused_engine_loads_and_scores_adapters(adapter_make, adapters, merged):
    engine = await adapter_make()
    running = await start_calls(engine, 2)
    await engine.pause()
    await serve(engine, adapters, 1)
    await check_scores(engine, merged, 1, prompt_ids(5, 40))
    assert engine.status().paused
    await engine.resume()
    assert engine.status().policy_version == 1
    for rollout in await running.end():
        rollout.check_pure(merged)
    assert (await collect(engine, make_call("fresh"))).stamps == {(1, 1)}
