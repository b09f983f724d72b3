"""Speculation of the torch engine: the same tokens as plain decoding, in fewer steps."""

import asyncio
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import count, cycle, islice
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from structlog.testing import capture_logs

from rollmesh.config.generator import GeneratorConfig
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.generator.engines.torch import speculation, torch_engine
from rollmesh.generator.engines.torch.speculation import MOST_TOKENS, Gate
from rollmesh.generator.engines.torch.torch_engine import TorchEngine
from rollmesh.types import FinishReason

from ...kit.generation import VOCAB, Rollout, Running, collect, hf_logits, make_call, p_value, prompt_ids
from ...kit.waiting import reached
from .made_steps import always_draft

_TEMPERATURES = (0.0, 0.7, 1.0)


@pytest.fixture
def speculating(monkeypatch: pytest.MonkeyPatch, engine_of: Callable[..., Any]) -> Callable[..., Any]:
    """``await speculating()``: an engine that uses every draft, whatever it has cost or brought."""
    monkeypatch.setattr(Gate, "measure", always_draft)
    monkeypatch.setattr(speculation, "_LEAST_CHANCE", 0.0)
    monkeypatch.setattr(speculation, "_LEAST_WIDTH", 16)
    monkeypatch.setattr(speculation, "_QUIET_MISSES", 100)
    monkeypatch.setattr(torch_engine, "MOST_CPU_TOKENS", MOST_TOKENS)

    async def make(**options: Any) -> TorchEngine:
        return await engine_of(speculation="history", **options)

    return make


def remember(engine: TorchEngine, rollouts: Sequence[Rollout]) -> None:
    """Make these answers the engine's history."""
    for rollout in rollouts:
        engine._thread.batch.speculation.remember(rollout.call.context_ids, rollout.tokens)  # type: ignore[union-attr]


def spoilt(rollout: Rollout) -> Rollout:
    """The answer with every fifth token wrong: each match of four is followed by a token that is not sampled."""
    chunks = [replace(chunk, token_ids=chunk.token_ids.copy()) for chunk in rollout.chunks]
    whole = replace(chunks[0], token_ids=rollout.tokens)
    whole.token_ids[4::5] = (whole.token_ids[4::5] + 1) % VOCAB
    return Rollout(rollout.call, [whole])


def check_equal(found: Rollout, wanted: Rollout) -> None:
    assert found.reason is wanted.reason
    np.testing.assert_array_equal(found.tokens, wanted.tokens)
    np.testing.assert_allclose(found.logprobs, wanted.logprobs, atol=1e-5, rtol=0)
    assert found.kept == wanted.kept


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"pace": [(1, 0.01)]}, r"generator\.speculation=history: generator\.pace has"),
        ({"engine": "sglang"}, r"generator\.speculation=history: for engine=torch only"),
        ({"speculation": "eagle"}, "speculation"),
    ],
)
def test_what_speculation_does_not_go_with_is_refused_by_name(changes, text):
    assert GeneratorConfig().speculation == "off"
    with pytest.raises(ValidationError, match=text):
        GeneratorConfig(**{"speculation": "history", **changes})


async def test_a_thousand_trajectories_are_those_of_plain_decoding_token_for_token(engine_of, speculating):
    """1,008 of 84 prompts, greedy and sampled; siblings and, for a third of them, their own answers are drafts."""
    options = {"slots": 32, "max_context_tokens": 200}
    plain, fast = await engine_of(**options), await speculating(**options)
    settings = islice(cycle(_TEMPERATURES), 1008)
    calls = [
        make_call(
            f"t{i}",
            prompt_ids(i % 84, 6 + i % 7),
            temperature=t,
            max_new_token_count=20 + i % 30 + 120 * (i % 10 == 0),
            chunk_token_count=5 + i % 40,
            stop_token_ids=(i % VOCAB,) if i % 10 else (),
        )
        for i, t in enumerate(settings)
    ]
    wanted = await asyncio.gather(*(collect(plain, call) for call in calls))
    long = [one.call.sampling.temperature for one in wanted if len(one.ids) > 128]  # in the second tier of the cache
    assert all(long.count(temperature) > 20 for temperature in _TEMPERATURES)
    remember(fast, wanted[:336])
    for one, other in zip(await asyncio.gather(*(collect(fast, call) for call in calls)), wanted, strict=True):
        check_equal(one, other)
    counters, status = fast.status().speculation, fast.status()
    assert {r.reason for r in wanted} == {FinishReason.STOP, FinishReason.LENGTH}
    assert counters is not None and 1000 < counters.accepted_token_total < counters.drafted_token_total
    assert sum(counters.row_tokens) == sum(len(r.tokens) for r in wanted) == status.generated_token_total
    assert sum(counters.row_tokens) - sum(counters.row_steps) == counters.accepted_token_total
    assert status.kv_tokens_used == 0


@pytest.mark.parametrize("graphs", [False, True], ids=["exact", "padded"])
@pytest.mark.parametrize("right", [True, False])
@pytest.mark.parametrize("name", ["qwen2", "qwen2-untied-grouped"])
async def test_drafts_that_are_always_right_or_always_wrong_change_no_token(
    engine_of, speculating, name, right, graphs
):
    options = {"name": name, "slots": 4, "cuda_graphs": graphs}
    plain, fast = await engine_of(**options), await speculating(**options)
    calls = [
        make_call(f"t{i}", prompt_ids(i, 5 + 9 * i), max_new_token_count=150, chunk_token_count=40) for i in range(4)
    ]
    calls[3] = replace(calls[3], sampling=replace(calls[3].sampling, top_p=0.8, kept_tokens=VOCAB))
    wanted = await asyncio.gather(*(collect(plain, call) for call in calls))
    remember(fast, wanted if right else [spoilt(rollout) for rollout in wanted])
    for one, other in zip(await asyncio.gather(*(collect(fast, call) for call in calls)), wanted, strict=True):
        check_equal(one, other)
        assert all(len(chunk.token_ids) <= 40 for chunk in one.chunks)
    counters = fast.status().speculation
    assert counters is not None
    if right:
        assert counters.accepted_token_total == counters.drafted_token_total > 300
        assert fast.status().decode_step_total < 75
    else:
        assert counters.accepted_token_total < 0.1 * counters.drafted_token_total


async def test_interrupted_held_and_preempted_calls_continue_with_the_tokens_of_plain_decoding(engine_of, speculating):
    plain = await engine_of(slots=8)
    calls = [make_call(f"t{i}", prompt_ids(i, 6 + i), max_new_token_count=180 + 5 * i) for i in range(8)]
    wanted = await asyncio.gather(*(collect(plain, call) for call in calls))
    tight, other = await speculating(slots=8, kv_token_capacity=600), await speculating(slots=5)
    for engine in (tight, other):
        remember(engine, [spoilt(r) if i % 2 else r for i, r in enumerate(wanted)])
    await asyncio.gather(*(collect(tight, make_call(f"s{i}", max_new_token_count=20)) for i in range(8)))
    limited = [replace(call, unacknowledged_token_limit=40) for call in calls]
    running = Running(tight, limited)
    await reached(lambda: tight.status().held_back_total >= 4)
    await tight.interrupt([call.trajectory_id for call in calls[::2]])
    begun = await running.end_saved(tight)
    for rollout, whole in zip(begun, wanted, strict=True):
        np.testing.assert_array_equal(rollout.tokens, whole.tokens[: len(rollout.tokens)])
    rest = [
        replace(
            r.call, context_ids=r.ids, max_new_token_count=len(w.tokens) - len(r.tokens), unacknowledged_token_limit=0
        )
        for r, w in zip(begun, wanted, strict=True)
        if len(r.tokens) < len(w.tokens)
    ]
    resumed = {r.call.trajectory_id: r for r in await asyncio.gather(*(collect(other, call) for call in rest))}
    for rollout, whole in zip(begun, wanted, strict=True):
        ended = resumed.get(rollout.call.trajectory_id, Rollout(rollout.call, []))
        np.testing.assert_array_equal(np.concatenate((rollout.tokens, ended.tokens)), whole.tokens)
    assert resumed
    # Under pressure of the cache alone:
    for one, whole in zip(await asyncio.gather(*(collect(tight, call) for call in calls)), wanted, strict=True):
        check_equal(one, whole)
    assert tight.status().preemption_total > 0 and tight.status().kv_tokens_used == 0


@pytest.mark.parametrize("mode", [OnNewVersion.INTERRUPT, OnNewVersion.KEEP_KV, OnNewVersion.DRAIN])
async def test_tokens_are_stamped_with_the_version_that_sampled_them_through_loads(
    model_folder, engine_of, speculating, mode
):
    plain, fast = await engine_of(), await speculating()
    calls = [make_call(f"t{i}", prompt_ids(i, 8), max_new_token_count=200) for i in range(6)]
    remember(fast, await asyncio.gather(*(collect(plain, call) for call in calls)))
    running = await Running(fast, calls).begun()
    await fast.load(model_folder("qwen2", seed=1), 1, mode)
    after = await asyncio.gather(
        *(collect(fast, replace(call, trajectory_id=f"n{call.trajectory_id}")) for call in calls)
    )
    folders = [model_folder("qwen2"), model_folder("qwen2", seed=1)]
    for rollout in await running.end():
        if mode is OnNewVersion.KEEP_KV:
            assert rollout.versions == sorted(rollout.versions)
            pure = [chunk for chunk in rollout.chunks if chunk.policy_version == chunk.kv_min_version == 0]
            Rollout(rollout.call, pure).check_pure(folders)
        else:
            rollout.check_pure(folders)
            assert len(rollout.tokens) == 200 or mode is OnNewVersion.INTERRUPT
    for rollout in after:
        assert set(rollout.versions) == {1}
        rollout.check_pure(folders)


async def test_a_policy_of_another_tokenizer_drops_the_history_and_says_so_once(model_folder, speculating, tmp_path):
    engine = await speculating()
    for version, words in enumerate(("a", "a", "b", "b")):
        folder = tmp_path / str(version)
        shutil.copytree(model_folder(), folder)
        (folder / "tokenizer.json").write_text(words)
        with capture_logs() as logs:
            await engine.load(folder, version + 1, OnNewVersion.INTERRUPT)
        assert [entry["event"] for entry in logs].count("drafts_dropped") == (version == 2)
        before = engine.status().speculation.drafted_token_total
        for again in range(2):
            await collect(engine, make_call(f"v{version}.{again}", temperature=0.0))
        drafted = engine.status().speculation.drafted_token_total - before
        assert drafted > 0


@pytest.mark.parametrize(
    "draws", [20_000, pytest.param(1_000_000, marks=(pytest.mark.long, pytest.mark.timeout(1800)))]
)
async def test_tokens_follow_the_exact_distribution_of_the_model(model_folder, speculating, draws):
    """Each token becomes a number in the interval of its probability: these numbers are uniform, in 50 classes."""
    engine, length, rng = await speculating(slots=64), 100, np.random.default_rng(0)
    context, counts = prompt_ids(1, 6), np.zeros(50)
    for first in range(0, draws // length, 100):
        calls = [
            make_call(f"t{first + i}", context, temperature=0.3, max_new_token_count=length, chunk_token_count=50)
            for i in range(100)
        ]
        for rollout in await asyncio.gather(*(collect(engine, call) for call in calls)):
            exact = torch.softmax(hf_logits(model_folder(), rollout.ids)[-length:].double() / 0.3, -1).numpy()
            ends, at = exact.cumsum(1), np.arange(length)
            share = exact[at, rollout.tokens]
            place = ends[at, rollout.tokens] - share * rng.random(length)
            counts += np.bincount(np.minimum(place * 50, 49).astype(np.int64), minlength=50)
    drafted = engine.status().speculation
    assert counts.sum() == draws and drafted.accepted_token_total > draws / 50
    assert p_value(counts, np.full(50, 1 / 50)) > 0.001


async def test_an_engine_whose_drafts_bring_nothing_stops_to_use_them_and_one_whose_do_goes_on(engine_of):
    """A step takes one tick of the clock, plain or wide; 12 answers of 230 tokens, of one call at a time."""
    drafted, steps, rested = {}, {}, {}
    for right in (True, False):
        plain, engine = await engine_of("qwen3", slots=2), await engine_of("qwen3", slots=2, speculation="history")
        engine._thread.batch.speculation.clock = count().__next__
        calls = [make_call(f"t{i}", prompt_ids(i), max_new_token_count=230) for i in range(4)]
        wanted = [await collect(plain, call) for call in calls]
        remember(engine, wanted if right else [spoilt(rollout) for rollout in wanted])
        totals = []
        for _ in range(3):
            for call, whole in zip(calls, wanted, strict=True):
                check_equal(await collect(engine, call), whole)
                # The answers would be right drafts for the next round.
                if not right:
                    engine._thread.batch.speculation.drafts.clear()
                    remember(engine, [spoilt(rollout) for rollout in wanted])
            totals.append(engine.status().speculation.drafted_token_total)
        gate = engine._thread.batch.speculation.gates[0]
        drafted[right], rested[right] = totals, gate.rests_until
        steps[right] = engine.status().decode_step_total
        await engine.aclose()
    assert not rested[True] and drafted[True][0] < drafted[True][1] < drafted[True][2]
    assert steps[True] < 0.5 * 12 * 230
    assert rested[False] and drafted[False][2] < 0.05 * drafted[True][2]
    assert steps[False] > 0.95 * 12 * 230
