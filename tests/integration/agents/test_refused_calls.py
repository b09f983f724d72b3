"""Bad input of agents: each a typed error that the OpenAPI document promises, with nothing lost of the session."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import openai
import pytest

from rollmesh.runtime.addresses import free_port

from ...kit.schema_requests import ask_everything, wrong_methods
from .agent_client import Agent, http_of, state
from .agent_mesh import TOKEN, AgentMesh, agents_process
from .tool_model import ADD, QUESTION


async def test_what_a_call_gets_wrong_is_named_and_the_session_goes_on(tools_mesh: AgentMesh) -> None:
    async with tools_mesh.api() as api, http_of(api) as http:
        told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
        key = {"Authorization": f"Bearer {told['api_key']}"}
        properties = {f"p{n}": {"type": "string"} for n in range(40_000)}  # a megabyte
        big = {"name": "big", "parameters": {"type": "object", "properties": properties}}
        tools, json_format = [{"type": "function", "function": big}], {"type": "json_object"}

        async def call(*messages: dict[str, Any], **fields: Any) -> tuple[int, Any]:
            body = {"model": told["model"], "messages": [QUESTION, *messages], "tools": [ADD], **fields}
            answer = await http.post("/chat/completions", json=body, headers=key)
            return answer.status_code, answer.json()

        def result(call_id: str, text: str) -> dict[str, Any]:
            return {"role": "tool", "tool_call_id": call_id, "content": text}

        _, answer = await call()
        said = answer["choices"][0]["message"]
        known = [said, *[result(c["id"], text) for c, text in zip(said["tool_calls"], ("5", "five"), strict=True)]]
        before = await state(http, told["id"])
        for (status, answer), expected, code, param in (
            (await call(said, result("nobody", "5")), 400, None, "messages.2.tool_call_id"),
            (await call(said, known[1], known[1]), 400, None, "messages.3.tool_call_id"),
            (await call(*known, tools=tools), 400, "context_length_exceeded", "messages"),
            (await call(messages=[{"role": "user", "content": "x" * 10_000_000}]), 413, None, "body"),
            (await call(*known, model="gpt-4"), 404, "model_not_found", "model"),
            (await call(*known, response_format=json_format), 400, "unsupported_parameter", "response_format"),
        ):  # fmt: skip
            assert (status, answer["error"]["code"], answer["error"]["param"]) == (expected, code, param), answer
            # The words by which litellm and LangChain know a context that is full.
            words = ("This model's maximum context length is", "context_length_exceeded")
            assert all((word in answer["error"]["message"]) == (code == words[1]) for word in words), answer
        after = await state(http, told["id"])
        assert (after["trajectories"], after["drift_count"]) == (before["trajectories"], 0)
        status, answer = await call(*known)
        assert status == 200 and "It is 5." in answer["choices"][0]["message"]["content"]
        assert (await state(http, told["id"]))["drift_count"] == 0


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


# The mesh runs in this process and draws random numbers while hypothesis makes requests in a thread.
@pytest.mark.filterwarnings("ignore:Do not use the `random` module:hypothesis.errors.HypothesisDeprecationWarning")
@pytest.mark.parametrize("program", ["agent", "single_turn"])
async def test_every_answer_of_v1_is_one_that_the_document_promises(
    make_mesh: Callable[..., Any], program: str
) -> None:
    # Room for every session that is asked for: one without room waits half a minute.
    pool = {"pool_size": 20 if program == "agent" else 8}
    mesh: AgentMesh = await make_mesh(rollout={"program": program}, schedule=pool)
    port = free_port()
    fixed = {"model": mesh.config.name, "wait_seconds": 0.1}
    async with agents_process(mesh, port) as process:
        document = f"http://127.0.0.1:{port}/v1/openapi.json"
        everywhere = "/(inference/)?v1/"
        asked = await asyncio.to_thread(ask_everything, document, TOKEN, everywhere, fixed, accepts_valid=False)
        assert asked == 11
        assert await asyncio.to_thread(wrong_methods, document, TOKEN, "/v1/") == []
        assert process.poll() is None
    assert "request_failed" not in (Path(mesh.config.folder) / "agents.log").read_text()
