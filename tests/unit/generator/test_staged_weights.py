"""Staged weights are scored beside the weights in use, and one swap puts them in their place."""

from __future__ import annotations

import asyncio
import threading

import numpy as np
import pytest

from rollmesh.errors import EngineError
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch.adapters import BASE
from rollmesh.generator.engines.torch.decoder_model import DecoderModel

from ...kit.generation import collect, hf_logprobs, make_call, prompt_ids

NAMES = ["qwen2", "qwen2-untied-grouped", "qwen3", "llama3-biased"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("in_place", [False, True])
async def test_staged_weights_score_as_their_model_does_before_and_after_the_swap(
    engine_of, model_folder, name, in_place
):
    engine = await engine_of(name, cuda_graphs=in_place)
    ids = prompt_ids(3, 40)
    wanted = [hf_logprobs(model_folder(name, seed), ids) for seed in range(3)]
    for version in (1, 2):
        assert await engine.stage(model_folder(name, version), version)
        (staged,), (used,) = await engine.score([ids], version), await engine.score([ids])
        np.testing.assert_allclose(staged, wanted[version], atol=1e-4)
        np.testing.assert_allclose(used, wanted[version - 1], atol=1e-4)
        await engine.load(model_folder(name, version), version, OnNewVersion.KEEP_KV)
        rollout = await collect(engine, make_call(f"v{version}"))
        np.testing.assert_allclose((await engine.score([ids]))[0], wanted[version], atol=1e-4)
        rollout.check_pure([model_folder(name, seed) for seed in range(3)])


async def test_staged_weights_in_bfloat16_score_as_they_do_in_use(engine_of, model_folder):
    engine = await engine_of(dtype="bfloat16")
    await engine.stage(model_folder(seed=1), 1)
    staged = await engine.score([prompt_ids(3, 40)], 1)
    await engine.load(model_folder(seed=1), 1, OnNewVersion.INTERRUPT)
    np.testing.assert_array_equal(staged, await engine.score([prompt_ids(3, 40)]))


async def test_calls_decode_while_staged_weights_are_scored(engine_of, model_folder, monkeypatch):
    engine = await engine_of()
    score, decoded = DecoderModel.score, threading.Event()

    def held_score(self, tokens, place=BASE):
        assert decoded.wait(60), "no call decodes while the staged weights are scored"
        return score(self, tokens, place)

    monkeypatch.setattr(DecoderModel, "score", held_score)
    await engine.stage(model_folder(seed=1), 1)
    scoring = asyncio.create_task(engine.score([prompt_ids(3, 40)], 1))
    rollout = await collect(engine, make_call())
    assert not scoring.done()
    decoded.set()
    (staged,) = await scoring
    np.testing.assert_allclose(staged, hf_logprobs(model_folder(seed=1), prompt_ids(3, 40)), atol=1e-4)
    rollout.check_pure([model_folder()])


async def test_only_the_version_in_service_and_the_staged_one_can_be_scored_by_name(engine_of, model_folder):
    engine = await engine_of()
    ids = prompt_ids(3, 40)
    with pytest.raises(EngineError, match="policy version 1 is not loaded; stage it before it is scored"):
        await engine.score([ids], 1)
    await engine.stage(model_folder(seed=1), 1)
    await engine.score([ids], 1)
    await engine.load(model_folder(seed=1), 1, OnNewVersion.INTERRUPT)
    np.testing.assert_array_equal(await engine.score([ids], 1), await engine.score([ids]))
    with pytest.raises(EngineError, match="policy version 0 is not loaded"):
        await engine.score([ids], 0)
