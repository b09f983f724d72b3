"""Turns that continue what ended calls left in the cache: their numbers are those without it, and it is never stale."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest

from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch import kept_prefixes
from rollmesh.generator.engines.torch.kept_prefixes import Prefix, Prefixes
from rollmesh.generator.engines.torch.kernels import NumpyMultiply, TorchMultiply

from ...kit.generation import Rollout, collect, make_call, prompt_ids
from .conftest import CONFIGS

HEARD = 9
"""Tokens of a tool's result."""


def turn_of(session: int, number: int, before: Rollout | None):
    """The call of a session's next turn: all that was said before, and what was heard."""
    count = 20 + 7 * session
    context = prompt_ids(100 * session, count)
    if before is not None:
        context = np.concatenate((before.ids, prompt_ids(100 * session + number, HEARD)))
    return make_call(f"s{session}", context, prompt_token_count=count, max_new_token_count=17 + 3 * session)


async def play(engine, sessions: int, turns: int) -> list[list[Rollout]]:
    """Play sessions at once, turn by turn."""
    played: list[list[Rollout]] = [[] for _ in range(sessions)]
    for number in range(turns):
        calls = [turn_of(at, number, own[-1] if own else None) for at, own in enumerate(played)]
        for own, rollout in zip(played, await asyncio.gather(*(collect(engine, c) for c in calls)), strict=True):
            own.append(rollout)
    return played


async def check_without(bare, rollout: Rollout) -> None:
    """An engine that has forgotten all earlier calls samples the same."""
    bare._thread.batch._forget_prefixes()
    wanted = await collect(bare, rollout.call)
    assert sum(c.cached_token_count for c in wanted.chunks) == 0
    np.testing.assert_array_equal(rollout.tokens, wanted.tokens)
    np.testing.assert_allclose(rollout.logprobs, wanted.logprobs, atol=1e-4)


@pytest.mark.parametrize("multiply", [TorchMultiply, NumpyMultiply])
@pytest.mark.parametrize("sessions", [1, 3, 8])
@pytest.mark.parametrize("name", ["qwen3", "llama3-biased"])
async def test_turns_that_find_their_session_in_the_cache_equal_those_without(
    engine_of, model_folder, monkeypatch, name, sessions, multiply
):
    monkeypatch.setattr("rollmesh.generator.engines.torch.decoder_model.fastest_multiply", lambda *_: multiply())
    engine, bare = await engine_of(name, kv_token_capacity=20_000), await engine_of(name)
    for own in await play(engine, sessions, turns=4):
        for before, rollout in pairwise(own):
            # All but the last sampled token, whose key is computed in the step after it.
            assert rollout.chunks[0].cached_token_count == len(before.ids) - 1
            await check_without(bare, rollout)
            rollout.check_pure([model_folder(name)])
    assert engine.status().reprefill_token_total == 3 * HEARD * sessions


@pytest.mark.parametrize("name", CONFIGS)
async def test_contexts_longer_than_the_full_score_matrix_continue_too(engine_of, model_folder, monkeypatch, name):
    monkeypatch.setattr("rollmesh.generator.engines.torch.decoder_model._SHORT_CONTEXT", 32)
    engine = await engine_of(name)
    (own,) = await play(engine, 1, turns=3)
    assert own[2].chunks[0].cached_token_count == len(own[1].ids) - 1
    own[2].check_pure([model_folder(name)])


@pytest.mark.parametrize("mode", [OnNewVersion.KEEP_KV, OnNewVersion.INTERRUPT, OnNewVersion.DRAIN])
async def test_nothing_is_found_across_a_reload(engine_of, model_folder, mode):
    engine = await engine_of(pace=[(1, 0.005)])
    folders = [model_folder(), model_folder(seed=1)]
    ((*_, before),) = await play(engine, 1, turns=2)
    running = asyncio.create_task(collect(engine, make_call("long", prompt_ids(5), max_new_token_count=60)))
    while not engine.status().running_count:
        await asyncio.sleep(0)
    await engine.load(folders[1], 1, mode)
    for ids in (before.ids, (await running).ids):
        rollout = await collect(engine, make_call("next", np.concatenate((ids, prompt_ids(9)))))
        assert (rollout.versions[0], rollout.chunks[0].cached_token_count) == (1, 0)
        rollout.check_pure(folders)


async def test_the_sessions_that_ended_first_are_evicted_and_computed_again(engine_of, model_folder):
    engine, bare = await engine_of(slots=2, kv_token_capacity=1500), await engine_of()
    rollouts = [await collect(engine, make_call(f"s{at}", prompt_ids(at, 60))) for at in range(20)]
    cache, found = engine._thread.batch.cache, []
    for at in (19, 18, 0):
        ids = np.concatenate((rollouts[at].ids, prompt_ids(at)))
        rollout = await collect(engine, make_call(f"s{at}", ids, prompt_token_count=60))
        found.append(rollout.chunks[0].cached_token_count)
        await check_without(bare, rollout)
        assert cache.allocated + cache.prefixes.kept_tokens <= 1500
    assert found == [99, 99, 0], "20 sessions of 100 tokens do not fit"


async def test_a_call_left_by_its_caller_an_edited_context_and_a_shared_beginning_are_found(engine_of, model_folder):
    engine = await engine_of(pace=[(1, 0.005)])
    shared = prompt_ids(3, 60)
    stream = engine.generate(make_call("left", shared, max_new_token_count=150))
    said = np.concatenate((shared, (await anext(stream)).token_ids))
    await stream.aclose()
    while engine.status().running_count:
        await asyncio.sleep(0)
    contexts = (said, np.concatenate((said[:50], prompt_ids(8, 20))), np.concatenate((shared, prompt_ids(4, 30))))
    for ids, least in zip(contexts, (len(said) - 1, 50, 60), strict=True):
        rollout = await collect(engine, make_call("other", ids, max_new_token_count=20))
        assert rollout.chunks[0].cached_token_count == least
        rollout.check_pure([model_folder()])


async def test_calls_that_start_together_copy_from_the_first_of_them(engine_of, model_folder):
    engine = await engine_of()
    shared = prompt_ids(3, 60)
    calls = [make_call(f"t{at}", np.concatenate((shared, prompt_ids(at, 5 * at)))) for at in range(5)]
    rollouts = await asyncio.gather(*(collect(engine, call) for call in calls))
    assert [r.chunks[0].cached_token_count for r in rollouts] == [0, 59, 59, 59, 59]
    for rollout in rollouts:
        rollout.check_pure([model_folder()])


def test_one_of_many_prefixes_with_the_same_beginning_is_found_by_few_comparisons(monkeypatch):
    opening, prefixes, compared = prompt_ids(3, 43), Prefixes(), []
    said = [np.concatenate((opening, prompt_ids(at, 2 + at % 300))) for at in range(2000)]
    for ids in said:
        prefixes.add(Prefix(policy_version=1, token_ids=ids))
    common = kept_prefixes._common
    monkeypatch.setattr(kept_prefixes, "_common", lambda *both: compared.append(both) or common(*both))
    for at in range(0, 2000, 37):
        assert prefixes.longest(1, np.concatenate((said[at], prompt_ids(5000 + at, 40))))[1] == len(said[at])
    for at in range(50):
        assert prefixes.longest(1, np.concatenate((opening, prompt_ids(9000 + at, 40))))[1] >= len(opening)
    assert prefixes.longest(2, said[0]) == (None, 0)
    assert len(compared) <= 8 * (55 + 50)
