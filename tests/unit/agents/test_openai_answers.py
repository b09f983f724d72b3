"""Answers while they are sampled, and the frames of a stream."""

import asyncio
import json
from typing import Any

import numpy as np
import pytest

from rollmesh.agents.answer_stream import AnswerStream, AnswerTurn, Delta, TokenLogprob
from rollmesh.agents.openai_answers import AnswerFormat, Choice
from rollmesh.text import Tokenizer
from rollmesh.types import FinishReason, OutcomeKind, Prompt, RewardOutcome, Trajectory, TurnReturn
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.agent_mark import AgentMark, posted_outcome

from ...kit.chat_tokenizers import make_tokenizer
from ...kit.records import policy_tokens


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def make_held(tokenizer: Tokenizer) -> ActiveTrajectory:
    prompt = Prompt(prompt_id="p", token_ids=tokenizer.encode("hello"), verifier="")
    return ActiveTrajectory(Trajectory(trajectory_id="t", group_id="g", member_index=0, prompt=prompt))


def add(held: ActiveTrajectory, tokenizer: Tokenizer, text: str, version: int = 0) -> None:
    ids = [int(i) for c in text for i in tokenizer.encode(c)]
    held.add(policy_tokens(ids, version, behavior_logprobs=np.full(len(ids), -0.5, np.float32)))


async def test_text_is_told_as_it_becomes_certain_and_a_stop_string_ends_the_call(tokenizer: Tokenizer) -> None:
    held = make_held(tokenizer)
    stream = AnswerStream(AnswerTurn(tokenizer, held.context_ids(), ["STOP"]), 0)
    held.observe(stream.update)

    async def sample() -> FinishReason:
        for text in ("one S", "T two", " STO", "P three"):
            add(held, tokenizer, text)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            if held.stop_requested:
                return FinishReason.STOP
        raise AssertionError("the call went on behind its answer")

    deltas = [delta async for delta in stream.run(sample)]
    assert "".join(d.text for d in deltas) == "one ST two "
    assert all("STO" not in d.text for d in deltas)
    assert [d.finish_reason for d in deltas][-1] == "stop"
    assert held.token_count == len("one ST two ")
    assert sum(len(d.logprobs) for d in deltas) == held.token_count


async def test_a_reader_that_leaves_cancels_the_call_and_an_error_reaches_it(tokenizer: Tokenizer) -> None:
    held = make_held(tokenizer)
    stream = AnswerStream(AnswerTurn(tokenizer, held.context_ids()), 0)
    held.observe(stream.update)
    cancelled = asyncio.Event()

    async def forever() -> FinishReason:
        add(held, tokenizer, "one")
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return FinishReason.STOP

    deltas = stream.run(forever)
    assert (await anext(deltas)).text == "one"
    await deltas.aclose()
    assert cancelled.is_set()

    async def broken() -> FinishReason:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        async for _ in AnswerStream(AnswerTurn(tokenizer, held.context_ids()), 0).run(broken):
            pass


async def test_a_replay_tells_all_of_a_complete_answer(tokenizer: Tokenizer) -> None:
    turn = AnswerTurn(tokenizer, tokenizer.encode("x"))
    held = make_held(tokenizer)
    add(held, tokenizer, "an answer")
    turn.feed(held.segments[0])
    turn.finish()
    assert turn.new_text(final=True) == "an answer"
    for _ in range(2):
        delta = AnswerStream(turn.unsent_copy(), 0).replay("length")
        assert (delta.text, delta.finish_reason, len(delta.token_ids)) == ("an answer", "length", 9)


def shape(endpoint: Any, **changes: Any) -> AnswerFormat:
    fields: dict[str, Any] = {
        "logprobs": True,
        "token_ids": True,
        "contexts": [np.array([1, 2, 3], np.int32)],
        **changes,
    }
    return AnswerFormat(endpoint=endpoint, answer_id="id", created=7, model="trial", **fields)


TOKENS = [TokenLogprob(token_id=5, token="h\u00e9", logprob=-0.25), TokenLogprob(token_id=6, token="y", logprob=-1.0)]


def parse(event: bytes | None) -> dict[str, Any]:
    assert event is not None and event.startswith(b"data: ") and event.endswith(b"\n\n")
    assert event.count(b"\n") == 2, "one line an event"
    return json.loads(event.removeprefix(b"data: "))


async def test_a_stream_has_the_offsets_of_the_whole_answer_although_a_stop_string_may_be_beginning(
    tokenizer: Tokenizer,
) -> None:
    held, form = make_held(tokenizer), shape("completions")
    stream = AnswerStream(AnswerTurn(tokenizer, held.context_ids(), ["##"]), 0)
    held.observe(stream.update)

    async def sample() -> FinishReason:
        for text in ("abc#", "de"):
            add(held, tokenizer, text)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        return FinishReason.LENGTH

    choice, events = Choice(), []
    async for delta in stream.run(sample):
        events.append(parse(form.piece(0, delta, choice, {}))["choices"][0])
        choice.add(delta)
    assert [event["text"] for event in events][:2] == ["abc", "#de"], "the text is sent before its tokens"
    assert [at for event in events for at in event["logprobs"]["text_offset"]] == list(range(6))
    assert form.whole([choice], {})["choices"][0]["logprobs"]["text_offset"] == list(range(6))


def test_frames_of_a_chat_stream_say_who_speaks_then_what_then_why_it_ends() -> None:
    form = shape("chat", choices_per_context=2)
    first = parse(shape("chat", choices_per_context=2, token_ids=False).first(1))
    assert first["object"] == "chat.completion.chunk"
    assert first["choices"] == [{"index": 1, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]
    delta = Delta(text="h\u00e9\ny", logprobs=TOKENS, token_ids=[5, 6])
    piece = parse(form.piece(1, delta, Choice(), {}))["choices"][0]
    assert piece["delta"] == {"content": "h\u00e9\ny"}
    assert piece["logprobs"]["content"][0] == {
        "token": "h\u00e9", "logprob": -0.25, "bytes": [104, 195, 169], "top_logprobs": [],
    }  # fmt: skip
    assert piece["token_ids"] == [5, 6]
    last = parse(form.piece(1, Delta(text="", finish_reason="stop"), Choice(), {"policy_versions": [4]}))
    assert (last["choices"][0]["delta"], last["choices"][0]["finish_reason"]) == ({}, "stop")
    assert last["rollmesh"] == {"policy_versions": [4]}
    choice = Choice()
    choice.add(Delta(text="hy", logprobs=TOKENS, finish_reason="stop", cached_token_count=2))
    usage = parse(shape("chat", sends_usage=True).last([choice], {}).removesuffix(b"data: [DONE]\n\n"))
    assert (usage["choices"], usage["usage"]["total_tokens"]) == ([], 5)
    assert usage["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}


def test_completions_have_offsets_and_both_leave_out_what_nobody_asked_for() -> None:
    form = shape("completions")
    assert shape("completions", token_ids=False).first(0) == b""
    before = Choice()
    before.add(Delta(text="so", logprobs=[TokenLogprob(token_id=4, token="so<s>", logprob=-0.5)]))
    piece = parse(form.piece(0, Delta(text="h\u00e9y", logprobs=TOKENS), before, {}))["choices"][0]
    assert piece["text"] == "h\u00e9y"
    assert piece["logprobs"]["text_offset"] == [5, 7]
    choice = Choice()
    choice.add(Delta(text="h\u00e9y", logprobs=TOKENS, finish_reason="length"))
    whole = form.whole([choice], {})
    assert whole["object"] == "text_completion"
    assert whole["prompt_token_ids"] == [1, 2, 3]
    plain = shape("completions", logprobs=False, token_ids=False).whole([choice], {})
    assert plain["choices"] == [{"index": 0, "finish_reason": "length", "text": "h\u00e9y", "logprobs": None}]
    assert "prompt_token_ids" not in plain


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_the_first_event_of_each_answer_has_the_ids_of_its_context(endpoint: Any) -> None:
    form = shape(endpoint, contexts=[np.array([1, 2, 3], np.int32), np.array([4, 5], np.int32)], choices_per_context=2)
    firsts = [parse(form.first(index)) for index in range(4)]
    assert [first["prompt_token_ids"] for first in firsts] == [[1, 2, 3], [1, 2, 3], [4, 5], [4, 5]]
    assert [first["choices"][0]["index"] for first in firsts] == [0, 1, 2, 3]
    assert all(first["choices"][0]["token_ids"] == [] for first in firsts)
    assert "prompt_token_ids" not in parse(form.piece(0, Delta(text="a"), Choice(), {}))


def test_a_mark_comes_back_as_it_was_and_tells_the_reward() -> None:
    mark = AgentMark(
        session_id="s", trajectory_index=2, start_time=5.5, drift_count=1,
        turn={"characters": 3, "digest": "ab", "at": 9},
        outcome=RewardOutcome(
            kind=OutcomeKind.SCORED, value=0.5, parts={"x": 1.0}, turns=(TurnReturn(end=4, value=0.5),), shared_by="s",
        ),
        first_turn=3, turn_starts=(2, 9), finish_reason="environment",
    )  # fmt: skip
    assert AgentMark.from_bytes(mark.to_bytes()) == mark
    assert posted_outcome(mark.to_bytes()) == mark.outcome
    unknown = posted_outcome(AgentMark(session_id="s", trajectory_index=0, start_time=0.0).to_bytes())
    assert unknown is not None and unknown.kind is OutcomeKind.VERIFIER_ERROR
    assert posted_outcome(None) == unknown
    asked = AgentMark(session_id="s", trajectory_index=0, start_time=0.0, ask_verifier=True)
    assert posted_outcome(asked.to_bytes()) is None
