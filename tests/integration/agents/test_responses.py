"""Agents that speak the Responses API: the official client's calls, and the exact tokens in the queue."""

import asyncio
import json
from typing import Any

import openai

from .agent_client import http_of, sampled_tokens, state
from .agent_mesh import AgentMesh, Api
from .tool_model import ADD, QUESTION

TOOL = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]
SAMPLED = {"return_token_ids": True}


class Asking:
    """One conversation with the official client: whole or streamed, async or not."""

    def __init__(self, api: Api, told: dict[str, Any], *, streamed: bool, sync: bool) -> None:
        self.options: dict[str, Any] = {"model": told["model"], "tools": [TOOL], "extra_body": SAMPLED}
        self.client = {"base_url": f"{api.url}/sessions/{told['id']}/v1", "api_key": told["api_key"], "max_retries": 0}
        self.streamed, self.sync = streamed, sync
        self.events: list[Any] = []

    async def ask(self, items: Any, **options: Any) -> Any:
        asked = {**self.options, "input": items, **options}
        if self.sync:
            return await asyncio.to_thread(self._ask, asked)
        async with openai.AsyncOpenAI(**self.client) as client:
            if not self.streamed:
                return await client.responses.create(**asked)
            async with client.responses.stream(**asked) as stream:
                self.events = [event async for event in stream]
                return await stream.get_final_response()

    def _ask(self, asked: dict[str, Any]) -> Any:
        with openai.OpenAI(**self.client) as client:
            if not self.streamed:
                return client.responses.create(**asked)
            with client.responses.stream(**asked) as stream:
                self.events = list(stream)
                return stream.get_final_response()


def result_of(call: Any) -> dict[str, Any]:
    value = "5" if json.loads(call.arguments) == {"a": 2, "b": 3} else "five"
    return {"type": "function_call_output", "call_id": call.call_id, "output": value}


def kinds(events: list[Any]) -> list[str]:
    """The order of the events, several deltas of one part as one."""
    names = [event.type.removeprefix("response.") for event in events]
    return [name for name, before in zip(names, ["", *names], strict=False) if name != before]


async def test_items_are_answered_and_every_sampled_token_is_trained(tools_mesh: AgentMesh) -> None:
    mesh = tools_mesh
    sampled: dict[str, list[int]] = {}
    async with mesh.api() as api, http_of(api) as http:
        for streamed, sync in ((False, False), (True, False), (False, True), (True, True)):
            told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
            asking = Asking(api, told, streamed=streamed, sync=sync)
            first = await asking.ask([QUESTION])
            assert (first.status, first.output_text) == ("completed", "")
            assert [json.loads(item.arguments) for item in first.output] == [{"a": 2, "b": 3}, {"a": 3, "b": 2}]
            if streamed:
                call = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done"]
                call.append("output_item.done")
                assert kinds(asking.events) == ["created", "in_progress", *call, *call, "completed"]
            results = [result_of(item) for item in first.output]
            second = await asking.ask([QUESTION, *first.output, *results])
            thought, message = second.output
            assert (thought.type, thought.content[0].text) == ("reasoning", "both agree")
            assert (second.output_text, message.status) == ("It is 5.", "completed")
            if streamed:
                text = ["content_part.done", "output_item.done"]
                assert kinds(asking.events) == [
                    "created", "in_progress",
                    "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.done", *text,
                    "output_item.added", "content_part.added", "output_text.delta", "output_text.done", *text,
                    "completed",
                ]  # fmt: skip
                assert [event.sequence_number for event in asking.events] == list(range(len(asking.events)))
            ids = [answer.model_extra["token_ids"] for answer in (first, second)]
            context = second.model_extra["prompt_token_ids"]
            known = [*first.model_extra["prompt_token_ids"], *ids[0]]
            assert context[: len(known)] == known
            assert (second.usage.input_tokens, second.usage.output_tokens) == (len(context), len(ids[1]))
            # All that is not new: the generator still has the first call's keys and values.
            assert len(context) > second.usage.input_tokens_details.cached_tokens > len(known) / 2
            assert 0 < second.usage.output_tokens_details.reasoning_tokens < len(ids[1])
            shown = await state(http, told["id"])
            assert shown["drift_count"] == 0
            (trajectory,) = shown["trajectories"]
            sampled[trajectory["id"]] = [*ids[0], *ids[1]]
            assert (await http.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})).status_code == 200
        assert sampled_tokens(await mesh.batch(1)) == sampled


async def test_an_answer_at_the_limit_is_incomplete(tools_mesh: AgentMesh) -> None:
    async with tools_mesh.api() as api, api.client() as client:
        body: dict[str, Any] = {"model": tools_mesh.config.name, "input": QUESTION["content"], "tools": [TOOL]}
        cut = await client.responses.create(**body, max_output_tokens=3)
        events = [event async for event in await client.responses.create(**body, max_output_tokens=3, stream=True)]
    for answer in (cut, events[-1].response):
        assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert answer.output[-1].status == "incomplete" and answer.usage.output_tokens == 3
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].content == cut.output[0].content
