"""Contract of every generation engine; the same cases on each."""

import asyncio
from itertools import pairwise

import httpx
import numpy as np
import pytest

from rollmesh.errors import DataError, GenerationRefused
from rollmesh.generator.engines import call_limits
from rollmesh.generator.engines.engine_protocol import OnNewVersion
from rollmesh.types import FinishReason

from ..kit.generation import (
    VOCAB,
    Running,
    collect,
    hf_logits,
    hf_logprobs,
    hf_truncated,
    make_call,
    prompt_ids,
    start_calls,
)
from ..kit.waiting import reached
from .contract_kit import EOS, LONGEST, WAIT_SECONDS, hf_greedy

_POSTS = ("generate", "abort_request", "pause_generation", "continue_generation", "update_weights_from_disk")


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5, 0.0])
async def test_chunks_make_the_answer_and_logprobs_equal_teacher_forcing(engine, models, temperature):
    sizes = (8, 7, 8, 3)
    calls = [
        make_call(f"t{i}", prompt_ids(i, 3 + 9 * i), temperature=temperature, chunk_token_count=size)
        for i, size in enumerate(sizes)
    ]
    for rollout, size in zip(await asyncio.gather(*(collect(engine, call) for call in calls)), sizes, strict=True):
        assert (len(rollout.tokens), rollout.reason) == (40, FinishReason.LENGTH)
        assert all(0 < len(c.token_ids) <= size for c in rollout.chunks)
        assert [c.finish_reason for c in rollout.chunks[:-1]] == [None] * (len(rollout.chunks) - 1)
        rollout.check_pure(models)


async def test_greedy_equals_hugging_face_greedy(engine, models):
    rollout = await collect(engine, make_call(temperature=0.0, max_new_token_count=60))
    wanted = hf_greedy(models[0], rollout.call.context_ids, 60)
    np.testing.assert_array_equal(rollout.tokens, wanted)


async def test_top_k_and_top_p_restrict_the_draw_but_not_the_reported_distribution(engine, models):
    greedy = await collect(engine, make_call("g", temperature=0.0))
    for changes in ({"top_k": 1}, {"top_p": 1e-6}):
        narrow = await collect(engine, make_call("n", **changes))
        np.testing.assert_array_equal(narrow.tokens, greedy.tokens)
        narrow.check_pure(models)


@pytest.mark.parametrize(
    "changes",
    [{"top_p": 0.8}, {"top_k": 5, "temperature": 1.3}, {"min_p": 0.2, "temperature": 0.7}, {"top_p": 0.9, "top_k": 4}],
    ids=lambda changes: "-".join(changes),
)
async def test_tokens_of_truncated_sampling_come_with_the_sets_that_they_were_drawn_from(engine, models, changes):
    calls = [
        make_call(
            f"t{i}", prompt_ids(i), chunk_token_count=7 + i, **({"kept_tokens": 2 * VOCAB, **changes} if i else {})
        )
        for i in range(4)
    ]
    full, *truncated = await asyncio.gather(*(collect(engine, call) for call in calls))
    full.check_pure(models)
    assert not any(full.kept)
    for rollout in truncated:
        rollout.check_pure(models)
        logits = hf_logits(models[0], rollout.ids)[-len(rollout.tokens) :]
        wanted = [row.nonzero().flatten().tolist() for row in hf_truncated(logits, rollout.call.sampling)]
        if len(changes.keys() - {"temperature"}) == 1:
            assert rollout.kept == wanted
        else:  # SGLang takes top_p of the whole vocabulary, the others of what top_k keeps
            assert all(set(narrow) <= set(ids) for narrow, ids in zip(wanted, rollout.kept, strict=True))
            assert max(map(len, rollout.kept)) <= changes["top_k"]
        assert len({len(ids) for ids in rollout.kept}) > 1 or "top_k" in changes


async def test_interrupted_calls_and_those_that_meet_a_load_keep_the_sets_of_their_tokens(engine, models):
    running = await start_calls(engine, 4, top_p=0.8, kept_tokens=VOCAB)
    await engine.interrupt(["t1"])
    await engine.load(models[1], 1, OnNewVersion.INTERRUPT)
    rollouts = await running.end()
    assert len(rollouts[1].tokens) < 200
    for rollout in rollouts:
        assert all(token in ids for token, ids in zip(rollout.tokens.tolist(), rollout.kept, strict=True))
        rollout.check_pure(models)


async def test_without_a_top_k_the_largest_set_bounds_what_is_kept(engine, models):
    rollout = await collect(engine, make_call("wide", top_p=0.99, kept_tokens=3))
    rollout.check_pure(models)
    for kept, row in zip(rollout.kept, hf_logits(models[0], rollout.ids)[-len(rollout.tokens) :], strict=True):
        assert kept == sorted(row.topk(3).indices.tolist())


async def test_a_stop_token_ends_the_call_and_is_part_of_it(engine, models):
    plain = await collect(engine, make_call(temperature=0.0))
    stop = int(plain.tokens[17])
    first = int(np.flatnonzero(plain.tokens == stop)[0])
    unused = next(token for token in range(VOCAB) if token not in plain.tokens)
    stopped, other = await asyncio.gather(
        collect(engine, make_call(temperature=0.0, stop_token_ids=(unused, stop))),
        collect(engine, make_call("other", temperature=0.0)),
    )
    assert (stopped.reason, other.reason) == (FinishReason.STOP, FinishReason.LENGTH)
    np.testing.assert_array_equal(stopped.tokens, plain.tokens[: first + 1])
    stopped.check_pure(models)


async def test_the_model_s_own_end_token_is_an_ordinary_token_unless_the_call_says_otherwise(engine, models):
    unused = VOCAB - 1
    # Sampled answers may do without it; after this context it is the most likely token.
    context = next(ids for ids in map(prompt_ids, range(1000)) if hf_greedy(models[0], ids, 1)[0] == EOS)
    for stops in ((), (unused,)):
        limits = {"max_new_token_count": 40, "stop_token_ids": stops}
        calls = [make_call("greedy", context, temperature=0.0, **limits)]
        calls += [make_call(f"e{i}", prompt_ids(i), **limits) for i in range(6)]
        rollouts = await asyncio.gather(*(collect(engine, call) for call in calls))
        assert rollouts[0].tokens[0] == EOS and len(rollouts[0].tokens) > 1
        for rollout in rollouts:
            ended = rollout.reason is FinishReason.STOP
            assert ended == (unused in stops and rollout.tokens[-1] == unused)
            assert ended or len(rollout.tokens) == 40


@pytest.mark.parametrize(("count", "context", "expected"), [(1, 12, 1), (500, LONGEST - 5, 5), (500, LONGEST - 1, 1)])
async def test_length_is_the_budget_or_what_the_context_leaves(engine, models, count, context, expected):
    rollout = await collect(engine, make_call("t", prompt_ids(3, context), max_new_token_count=count))
    assert (len(rollout.tokens), rollout.reason) == (expected, FinishReason.LENGTH)
    rollout.check_pure(models)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context": np.empty(0, np.int32)}, "context_ids: empty"),
        ({"context": np.array([3, VOCAB], np.int32)}, r"context_ids\[1\]=61 is outside the vocabulary"),
        ({"context": np.array([-1], np.int32)}, r"context_ids\[0\]=-1"),
        ({"context": prompt_ids(0, LONGEST)}, "context_ids: 256 tokens leave no room"),
        ({"prompt_token_count": 13}, "prompt_token_count=13"),
        ({"max_new_token_count": 0}, "max_new_token_count=0"),
        ({"chunk_token_count": 0}, "chunk_token_count=0"),
        ({"unacknowledged_token_limit": 7}, "unacknowledged_token_limit=7"),
        ({"temperature": -1.0}, r"sampling\.temperature=-1"),
        ({"temperature": float("nan")}, r"sampling\.temperature=nan"),
        ({"top_p": 0.0}, r"sampling\.top_p=0"),
        ({"top_k": -2}, r"sampling\.top_k=-2"),
        ({"min_p": 1.0}, r"sampling\.min_p=1"),
        ({"kept_tokens": -1}, r"sampling\.kept_tokens=-1"),
        ({"top_k": 9, "kept_tokens": 8}, r"sampling\.kept_tokens=8"),
        ({"stop_token_ids": (VOCAB,)}, "stop_token_ids: 61"),
    ],
)
async def test_a_wrong_call_is_refused_by_its_field_and_the_engine_lives(engine, changes, message):
    with pytest.raises(DataError, match=message):
        await collect(engine, make_call("wrong", **changes))
    assert len((await collect(engine, make_call("right", max_new_token_count=3))).tokens) == 3


async def test_interrupting_one_call_ends_it_with_its_tokens_and_the_others_continue(engine, models):
    running = await start_calls(engine, 3)
    assert await engine.interrupt(["t1", "unknown"]) == 1
    rollouts = await running.end()
    assert [r.reason for r in rollouts] == [FinishReason.LENGTH, FinishReason.INTERRUPTED, FinishReason.LENGTH]
    assert 0 < len(rollouts[1].tokens) < 200
    for rollout in rollouts:
        rollout.check_pure(models)


async def test_interrupting_all_ends_waiting_calls_too(make):
    engine = await make(slots=1)
    running = await start_calls(engine, 1)
    waiting = Running(engine, [make_call("waiting")])
    await reached(lambda: engine.status().waiting_count == 1)
    assert await engine.interrupt() == 2
    (first,), (second,) = await running.end(), await waiting.end()
    assert first.reason is FinishReason.INTERRUPTED and len(first.tokens)
    assert (second.reason, len(second.tokens)) == (FinishReason.INTERRUPTED, 0)


async def test_an_interrupted_greedy_call_resumed_equals_an_uninterrupted_one(engine, models):
    running = await start_calls(engine, 1, temperature=0.0)
    await engine.interrupt()
    (begun,) = await running.end()
    rest = await collect(
        engine,
        make_call("t0", begun.ids, temperature=0.0, prompt_token_count=8, max_new_token_count=200 - len(begun.tokens)),
    )
    wanted = hf_greedy(models[0], prompt_ids(0, 8), 200)
    np.testing.assert_array_equal(np.concatenate((begun.tokens, rest.tokens)), wanted)


async def test_a_call_is_held_at_its_limit_until_its_caller_acknowledges_and_others_continue(
    engine, models, monkeypatch
):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", WAIT_SECONDS)
    held = Running(engine, [make_call("held", max_new_token_count=60, unacknowledged_token_limit=16)])
    await reached(lambda: engine.status().held_back_total == 1)
    (other,) = await Running(engine, [make_call("other", prompt_ids(1))]).end()
    assert other.reason is FinishReason.LENGTH
    rollout = held.rollouts[0]
    assert 8 < len(rollout.tokens) <= 16
    engine.acknowledge({"another": 99})
    await held.end_saved(engine)
    assert (len(rollout.tokens), rollout.reason) == (60, FinishReason.LENGTH)
    rollout.check_pure(models)


async def test_a_call_whose_caller_stops_acknowledging_ends_as_interrupted(make, models, monkeypatch):
    monkeypatch.setattr(call_limits, "_HOLD_SECONDS", WAIT_SECONDS)
    monkeypatch.setattr(call_limits, "_CONTENDED_HOLD_SECONDS", 0.05)
    engine = await make(slots=1)
    held = Running(engine, [make_call("held", max_new_token_count=60, unacknowledged_token_limit=16)])
    await reached(lambda: engine.status().held_back_total == 1)
    (waiting,) = await Running(engine, [make_call("waiting", prompt_ids(1))]).end()
    (rollout,) = await held.end()
    assert (waiting.reason, rollout.reason) == (FinishReason.LENGTH, FinishReason.INTERRUPTED)
    assert 8 < len(rollout.tokens) <= 16
    rollout.check_pure(models)


async def test_pause_holds_calls_and_resume_continues_them(engine, models):
    running = await start_calls(engine, 2)
    await engine.pause()
    assert engine.status().paused
    late = Running(engine, [make_call("late")])
    await reached(lambda: engine.status().waiting_count == 1)
    held = -1
    while held != engine.status().generated_token_total:  # answers from before the pause may be on their way
        held = engine.status().generated_token_total
        await asyncio.sleep(1.0)  # nothing to wait for: nothing must happen
    assert engine.status().running_count == 2
    await engine.resume()
    assert not engine.status().paused
    for rollout in (*await running.end(), *await late.end()):
        assert rollout.reason is FinishReason.LENGTH
        rollout.check_pure(models)
    assert engine.status().preemption_total == 0, "a pause is no lack of cache"


async def test_calls_are_interrupted_while_paused(engine):
    running = await start_calls(engine, 2)
    await engine.pause()
    assert await engine.interrupt() == 2
    assert {r.reason for r in await running.end()} == {FinishReason.INTERRUPTED}
    assert engine.status().paused
    await engine.resume()
    assert len((await collect(engine, make_call("next"))).tokens) == 40


async def test_a_client_without_the_key_gets_nothing_from_the_server(endpoint):
    _, url = endpoint
    if url is None:  # the embedded engine has no port
        return
    async with httpx.AsyncClient(base_url=url, timeout=WAIT_SECONDS) as outsider:
        for headers in ({}, {"Authorization": "Bearer wrong"}):
            answers = [await outsider.post(f"/{path}", json={"rid": "x"}, headers=headers) for path in _POSTS]
            answers += [await outsider.get(f"/{path}", headers=headers) for path in ("model_info", "server_info")]
            assert [a.status_code for a in answers] == [401] * 7


async def test_scores_equal_teacher_forcing_for_ragged_sequences(engine, models):
    sequences = [prompt_ids(i, count) for i, count in enumerate((40, 3, 17, 1, 100, LONGEST))]
    for ids, scores in zip(sequences, await engine.score(sequences), strict=True):
        assert len(scores) == len(ids) - 1
        np.testing.assert_allclose(scores, hf_logprobs(models[0], ids), atol=1e-4)


async def test_scoring_refuses_foreign_tokens_and_overlong_sequences(engine):
    with pytest.raises(DataError, match=r"sequences\[1\]"):
        await engine.score([prompt_ids(0), np.array([1, VOCAB], np.int32)])
    with pytest.raises(DataError, match="257 tokens"):
        await engine.score([prompt_ids(0, LONGEST + 1)])


async def test_members_of_a_group_share_the_prefill_of_their_prompt(make, models):
    engine = await make()
    context = prompt_ids(1, 30)
    await collect(engine, make_call("g.0", context, group_id="g"))
    before = engine.status()
    first = await start_calls(engine, 1, max_new_token_count=100)
    rollouts = await asyncio.gather(*(collect(engine, make_call(f"g.{i}", context, group_id="g")) for i in (1, 2, 3)))
    after = engine.status()
    cached = after.cached_token_total - before.cached_token_total
    assert cached >= 2 * 29
    assert sum(c.cached_token_count for r in (*rollouts, *first.rollouts) for c in r.chunks) == cached
    for rollout in (*rollouts, *await first.end()):
        rollout.check_pure(models)


async def test_a_turn_finds_what_its_session_has_said_in_the_prefix_cache(engine, models):
    heard, rollouts = 10, [await collect(engine, make_call("s", prompt_ids(11, 30)))]
    for number in range(2):
        ids = np.concatenate((rollouts[-1].ids, prompt_ids(20 + number, heard)))
        rollouts.append(await collect(engine, make_call("s", ids, prompt_token_count=30)))
    for before, rollout in pairwise(rollouts):
        assert len(before.ids) - 2 <= sum(c.cached_token_count for c in rollout.chunks) < len(rollout.call.context_ids)
        rollout.check_pure(models)


async def test_the_counters_of_the_status_only_grow_and_end_in_agreement(make):
    engine = await make(slots=3)
    running = Running(engine, [make_call(f"t{i}", prompt_ids(i, 4 + i), max_new_token_count=60) for i in range(9)])
    fields = [n for n in type(engine.status()).__dataclass_fields__ if n.endswith("_total")]
    names = [n for n in fields if getattr(engine.status(), n) is not None]
    assert [n for n in fields if n not in names] == (
        [] if make.kind.startswith("torch") else ["decode_step_total", "decode_seconds_total"]
    )
    last = {name: 0.0 for name in names}
    while not all(task.done() for task in running.tasks):
        status = engine.status()
        assert status.running_count <= status.slot_count == 3
        for name in names:
            assert getattr(status, name) >= last[name]
            last[name] = getattr(status, name)
        await asyncio.sleep(0.005)
    await running.end()
    status = engine.status()
    assert (status.running_count, status.waiting_count, status.kv_tokens_used) == (0, 0, 0)
    assert status.generated_token_total == 9 * 60
    assert 0 < status.busy_seconds_total <= status.running_slot_seconds_total
    assert status.prefill_token_total + status.cached_token_total >= sum(3 + i for i in range(9))


async def test_closing_a_stream_early_frees_its_slot(make):
    engine = await make(slots=1)
    stream = engine.generate(make_call("left", max_new_token_count=200))
    await anext(stream)
    await stream.aclose()
    task = asyncio.create_task(collect(engine, make_call("cancelled", max_new_token_count=200)))
    await reached(lambda: engine.status().running_count == 1)
    task.cancel()
    await reached(lambda: engine.status().running_count == 0)
    assert len((await collect(engine, make_call("next"))).tokens) == 40


async def test_closing_ends_calls_as_interrupted_and_refuses_new_ones(make):
    engine = await make(slots=1)
    running = await start_calls(engine, 1)
    waiting = Running(engine, [make_call("waiting")])
    await reached(lambda: engine.status().waiting_count == 1)
    await engine.aclose()
    assert {r.reason for r in (*await running.end(), *await waiting.end())} == {FinishReason.INTERRUPTED}
    with pytest.raises(GenerationRefused):
        await collect(engine, make_call())
