"""The Responses API: items as messages of a chat, and the parts of an answer as items and events."""

import json
from typing import Any

import numpy as np
import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from rollmesh.agents.answer_stream import Delta, TokenLogprob
from rollmesh.agents.chat_format import AnswerMessage
from rollmesh.agents.openai_answers import Choice
from rollmesh.agents.openai_errors import OpenAiError, as_openai, gone
from rollmesh.agents.responses_answers import ResponseFormat
from rollmesh.agents.responses_requests import ResponsesRequest

ASKED: dict[str, Any] = {"model": "trial", "input": "hello"}
TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object"}, "strict": True}


def call(call_id: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function_call", "call_id": call_id, "name": "add", "arguments": "{}", **fields}


def result(call_id: str, output: Any = "5") -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": call_id, "output": output}


def chat(items: Any, **fields: Any) -> dict[str, Any]:
    request = ResponsesRequest.model_validate({**ASKED, "input": items, **fields})
    return request.as_chat().model_dump(exclude_defaults=True)


def refusal(body: dict[str, Any]) -> OpenAiError:
    """The error that the API answers to a body."""
    try:
        ResponsesRequest.model_validate({**ASKED, **body}).as_chat()
    except OpenAiError as error:
        return error
    except ValidationError as error:
        return as_openai(RequestValidationError([{**e, "loc": ("body", *e["loc"])} for e in error.errors()]))
    raise AssertionError("it is accepted")


def test_items_that_follow_each_other_are_one_answer_and_fields_are_those_of_a_chat() -> None:
    said = {"type": "message", "role": "assistant", "id": "msg_1", "status": "completed", "phase": None}
    text = {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}
    thought = {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "2+3"}]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "2 + "}, {"type": "input_text", "text": "3?"}]},
        thought, {**said, "content": [text]}, call("a", id="fc_1", status="completed", namespace=None), call("b"),
        result("b"), result("a", [{"type": "input_text", "text": "five"}]),
        {**said, "content": "5"}, {**said, "content": "really"},
        {"role": "developer", "content": "be brief"},
    ]  # fmt: skip
    asked = chat(items, instructions="You add.", tools=[TOOL], max_output_tokens=7, temperature=0.5, store=False)
    function = {"name": "add", "arguments": "{}"}
    assert asked["messages"] == [
        {"role": "system", "content": "You add."},
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": "I add.", "reasoning_content": "2+3",
         "tool_calls": [{"id": "a", "function": function}, {"id": "b", "function": function}]},
        {"role": "tool", "content": "5", "tool_call_id": "b"},
        {"role": "tool", "content": "five", "tool_call_id": "a"},
        {"role": "assistant", "content": "5"},
        {"role": "assistant", "content": "really"},
        {"role": "developer", "content": "be brief"},
    ]  # fmt: skip
    assert asked["tools"] == [{"type": "function", "function": {k: v for k, v in TOOL.items() if k != "type"}}]
    assert (asked["max_tokens"], asked["temperature"], asked["model"]) == (7, 0.5, "trial")
    assert chat("hello") == {"model": "trial", "messages": [{"role": "user", "content": "hello"}]}


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({"input": [result("a")]}, "input.0.call_id", "'a' is of no call without a result"),
        ({"input": [call("a"), result("a"), result("a")]}, "input.2.call_id", "'a' is of no call without a result"),
        ({"input": [call("a"), call("a")]}, "input.1.call_id", "two calls have the same id"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0", "'item_reference' are not supported"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content.0.type", "input_image"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "'web_search': this server has no tools of its own"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice", "'auto', 'none' or 'required'"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "send the whole conversation"),
        ({"conversation": "conv_1"}, "conversation", "send the whole conversation"),
        ({"background": True}, "background", "not supported"),
        ({"store": True}, "store", "calls are recorded in sessions"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format.type", "'text'"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort", "ask for it in a message"),
        ({"include": ["message.output_text.logprobs"]}, "include.0", "reasoning.encrypted_content"),
        ({"n": 2}, "n", "1"),
    ],
)  # fmt: skip
def test_what_is_not_held_is_refused_by_its_name(body: dict[str, Any], param: str, words: str) -> None:
    error = refusal(body)
    assert (error.status, error.param) == (400, param)
    assert words in str(error)


def read(ids: Any) -> AnswerMessage:
    """The answer of four tokens: a thought, a text and two calls, the second of which is none."""
    calls = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}]
    unread = [{"name": None, "args": "{", "error": "invalid"}]
    done = len(ids) == 4
    return AnswerMessage(
        content="ok" if len(ids) > 1 else "",
        reasoning="hm",
        tool_calls=calls if len(ids) > 2 else [],
        invalid_tool_calls=unread if done else [],
    )


TOKENS = [TokenLogprob(token_id=i, token=text, logprob=-1.0) for i, text in enumerate(("hm", "ok", "<c>", "<c>"))]


def make(reads: Any = read) -> ResponseFormat:
    request = ResponsesRequest.model_validate({**ASKED, "tools": [TOOL], "metadata": {"a": "b"}})
    return ResponseFormat(
        endpoint="responses", answer_id="resp_7", created=7, model="trial", logprobs=False, token_ids=True,
        contexts=[np.array([1, 2, 3], np.int32)], read=reads, request=request,
    )  # fmt: skip


def deltas(reason: str) -> list[Delta]:
    return [
        Delta(
            text=token.token,
            logprobs=[token],
            token_ids=[token.token_id],
            cached_token_count=2,
            finish_reason=reason if token is TOKENS[-1] else None,
        )
        for token in TOKENS
    ]


def events_of(data: bytes) -> list[dict[str, Any]]:
    events = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        name, _, body = block.partition("\n")
        events.append(json.loads(body.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_last_event_of_a_stream_has_the_response_of_the_whole_answer(reason: str) -> None:
    form, choice = make(), Choice()
    data = form.first(0)
    for delta in deltas(reason):
        data += form.piece(0, delta, choice, {})
        choice.add(delta)
    events = events_of(data + form.last([choice], {"session": "s"}))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))

    whole = Choice()
    for delta in deltas(reason):
        whole.add(delta)
    response = make().whole([whole], {"session": "s"})
    assert events[-1]["response"] == response
    assert [item["type"] for item in response["output"]] == ["reasoning", "message", "function_call"]
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == response["output"]
    assert response["usage"] == {
        "input_tokens": 3, "input_tokens_details": {"cached_tokens": 2, "cache_write_tokens": 0},
        "output_tokens": 4, "output_tokens_details": {"reasoning_tokens": 1}, "total_tokens": 7,
    }  # fmt: skip
    assert response["invalid_tool_calls"] == [{"name": None, "args": "{", "error": "invalid"}]
    assert (response["prompt_token_ids"], response["token_ids"]) == ([1, 2, 3], [0, 1, 2, 3])
    assert response["metadata"] == {"a": "b"} and response["tools"] == [TOOL]
    assert response["status"] == ("completed" if reason == "stop" else "incomplete")
    limit = None if reason == "stop" else {"reason": "max_output_tokens"}
    assert response["incomplete_details"] == limit


def test_an_empty_answer_is_a_message_and_a_failed_one_has_the_error() -> None:
    empty = make(lambda ids: AnswerMessage(content="")).whole([Choice(finish_reason="stop")], {})
    (item,) = empty["output"]
    assert (item["type"], item["content"][0]["text"], item["status"]) == ("message", "", "completed")
    form = make(None)
    form.piece(0, Delta(text="so f"), Choice(), {})
    (failed,) = events_of(form.failed(gone("the session has ended", "session_ended")))
    assert failed["type"] == "response.failed" and failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "session_ended"
    assert failed["response"]["output"][0]["content"][0]["text"] == "so f"
