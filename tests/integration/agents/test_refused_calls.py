"""Bad input of agents, in chat and in Responses: each a typed error, with nothing lost of the session."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from .agent_client import Agent, http_of, state
from .agent_mesh import AgentMesh
from .tool_model import ADD, QUESTION

TOOL = {"type": "function", **ADD["function"]}  # type: ignore[dict-item]


class Dialect:
    """Bodies of one session's calls."""

    def __init__(self, name: str, told: dict[str, Any]) -> None:
        self.path = {"chat": "/chat/completions", "responses": "/responses"}[name]
        self.field = {"chat": "messages", "responses": "input"}[name]
        self.result_field = {"chat": "tool_call_id", "responses": "call_id"}[name]
        self.tool = {"chat": ADD, "responses": TOOL}[name]
        self.headers = {"Authorization": f"Bearer {told['api_key']}"}
        self.model = told["model"]

    def body(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        return {"model": self.model, self.field: messages, "tools": [self.tool], **fields}

    def answer_of(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """The messages or items of an answer, as a client sends them back."""
        return [answer["choices"][0]["message"]] if self.field == "messages" else list(answer["output"])

    def calls_of(self, answer: list[dict[str, Any]]) -> list[str]:
        if self.field == "messages":
            return [call["id"] for call in answer[0]["tool_calls"]]
        return [item["call_id"] for item in answer]

    def place(self, number: int) -> str:
        return f"{self.field}.{number}.{self.result_field}"

    def said(self, text: str) -> dict[str, Any]:
        return {"content" if self.field == "messages" else "output": text}

    def result(self, call_id: str, text: str) -> dict[str, Any]:
        if self.field == "messages":
            return {"role": "tool", "tool_call_id": call_id, **self.said(text)}
        return {"type": "function_call_output", "call_id": call_id, **self.said(text)}

    def big_tool(self) -> dict[str, Any]:
        schema = {"type": "object", "properties": {f"p{n}": {"type": "string"} for n in range(40_000)}}
        if self.field == "messages":
            return {"type": "function", "function": {"name": "big", "parameters": schema}}
        return {"type": "function", "name": "big", "parameters": schema}


@pytest.mark.parametrize("dialect", ["chat", "responses"])
async def test_what_a_call_gets_wrong_is_named_and_the_session_goes_on(tools_mesh: AgentMesh, dialect: str) -> None:
    async with tools_mesh.api() as api, http_of(api) as http:
        told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
        say = Dialect(dialect, told)

        async def call(body: dict[str, Any], **headers: str) -> httpx.Response:
            return await http.post(say.path, json=body, headers={**say.headers, **headers})

        answer = say.answer_of((await call(say.body([QUESTION]))).json())
        known = [QUESTION, *answer]
        results = [say.result(each, text) for each, text in zip(say.calls_of(answer), ("5", "five"), strict=True)]
        good = say.body([*known, *results])
        before = await state(http, told["id"])
        for body, status, code, param in (
            (say.body([*known, say.result("nobody", "5")]), 400, None, say.place(len(known))),
            (say.body([*known, results[0], results[0]]), 400, None, say.place(len(known) + 1)),
            ({**good, "tools": [say.big_tool()]}, 400, "context_length_exceeded", say.field),
            (say.body([{"role": "user", "content": "x " * 100_000}]), 400, "context_length_exceeded", say.field),
            (say.body([{"role": "user", "content": "x" * 10_000_000}]), 413, None, "body"),
            ({**good, "model": "gpt-4"}, 404, "model_not_found", "model"),
            ({**good, "model": f"{say.model}@7"}, 400, None, "model"),
            ({**good, "response_format": {"type": "json_object"}}, 400, "unsupported_parameter", "response_format"),
        ):
            refused = await call(body)
            error = refused.json()["error"]
            assert (refused.status_code, error["code"], error["param"]) == (status, code, param), error
        after = await state(http, told["id"])
        assert (after["trajectories"], after["drift_count"]) == (before["trajectories"], 0)

        # A client that leaves its stream, and then sends the call again, as the official clients do.
        streamed = {"json": {**good, "stream": True}, "headers": say.headers}
        async with http.stream("POST", say.path, **streamed) as stream:
            await anext(stream.aiter_lines())

        async def answered() -> bool:
            again = await call(good, **{"x-stainless-retry-count": "1"})
            assert again.status_code in (200, 409), again.text
            return again.status_code == 200 and "It is 5." in again.text

        await tools_mesh.until("the answer", answered)
        assert (await state(http, told["id"]))["drift_count"] == 0

        # Two agents in one session: no answer is mixed, and at most one call goes on.
        say_more = say.body([*known, *results, {"role": "assistant", "content": "It is 5."}, QUESTION])
        codes = sorted([each.status_code for each in await asyncio.gather(call(say_more), call(say_more))])
        assert codes in ([200, 409], [200, 200])

        # A context that is edited in the middle is another trajectory; what was recorded stays.
        drifts = (await state(http, told["id"]))["drift_count"]
        assert (await call(say.body([*known, {**results[0], **say.said("6")}, results[1]]))).status_code == 200
        shown = await state(http, told["id"])
        assert (shown["state"], shown["drift_count"]) == ("active", drifts + 1)
        assert len(shown["trajectories"]) > 1


async def test_a_reward_that_cannot_count_is_refused_and_the_one_that_does_counts_once(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        for agent in agents:
            await agent.turn()

        async def post(session: str, reward: str) -> tuple[int, str | None]:
            body = {"content": f'{{"reward": {reward}}}', "headers": {"Content-Type": "application/json"}}
            answer = await http.post(f"/sessions/{session}/reward", **body)
            error = answer.json().get("error", {})
            return answer.status_code, error.get("param") if answer.status_code == 400 else error.get("code")

        first, second = (agent.id for agent in agents)
        for odd in ("NaN", "Infinity", "1e999", '"much"', "null"):
            assert await post(first, odd) == (400, "reward"), odd
        assert await post("my-session", "1.0") == (404, "session_not_found")
        for session, reward in ((first, "1.0"), (second, "0.0"), (first, "1.0")):
            assert await post(session, reward) == (200, None)
        assert await post(first, "0.5") == (422, "already_rewarded")
        batch = await mesh.batch(1)
        assert [t.shaped_reward for t in batch.groups[0].trajectories] == [1.0, 0.0]

        # Their group is trained: the sessions have ended, and keep their rewards.
        assert await post(first, "1.0") == (200, None)
        for agent in agents:
            with pytest.raises(openai.APIStatusError) as gone:
                await agent.turn()
            assert (gone.value.status_code, gone.value.code) == (410, "session_ended")
            await agent.aclose()
