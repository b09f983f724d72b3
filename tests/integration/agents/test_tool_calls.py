"""Agents with tools: a model that calls them, the official client in between, and the exact tokens in the queue."""

import json
from typing import Any

import openai
import pytest
from renderers import config_from_name, create_renderer
from renderers.client import generate

from rollmesh.agents.chat_format import NamedTokenizer

from .agent_client import http_of, sampled_tokens, state
from .agent_mesh import AgentMesh
from .tool_model import ADD, QUESTION


def result_of(call: Any) -> dict[str, Any]:
    sent = json.loads(call.function.arguments)
    return {"role": "tool", "tool_call_id": call.id, "content": "5" if sent == {"a": 2, "b": 3} else "five"}


async def test_calls_of_tools_are_answered_and_every_sampled_token_is_trained(tools_mesh: AgentMesh) -> None:
    mesh = tools_mesh
    async with mesh.api() as api, http_of(api) as http:
        sampled: dict[str, list[int]] = {}
        for streamed in (False, True, False, True):
            told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
            async with api.client(api_key=told["api_key"]) as client:
                first = await answer(client, told, [QUESTION], streamed)
                assert [json.loads(c.function.arguments) for c in first.message.tool_calls] == [
                    {"a": 2, "b": 3},
                    {"a": 3, "b": 2},
                ]
                assert (first.finish_reason, first.message.content) == ("tool_calls", None)
                # What agent frameworks send back: the message as they keep it, and a result for each call.
                echo = first.message.model_dump(include={"role", "content", "tool_calls"})
                second = await answer(
                    client, told, [QUESTION, echo, *map(result_of, first.message.tool_calls)], streamed
                )
                assert (second.finish_reason, second.message.content) == ("stop", "It is 5.")
                assert second.message.model_extra["reasoning_content"] == "both agree"
            shown = await state(http, told["id"])
            assert shown["drift_count"] == 0
            (trajectory,) = shown["trajectories"]
            sampled[trajectory["id"]] = [*first.model_extra["token_ids"], *second.model_extra["token_ids"]]
            assert (await http.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})).status_code == 200
        batch = await mesh.batch(1)
        assert sampled_tokens(batch) == sampled
        for trajectory in (t for group in batch.groups for t in group.trajectories):
            text = mesh.tokenizer.decode(trajectory.response_ids, special_tokens=True)
            talk = text.partition(QUESTION["content"])[2]
            assert talk.count("<tool_call>") == talk.count("<tool_response>") == 2, talk
            assert "<tool_response>\n5\n</tool_response>" in talk and talk.endswith("It is 5.<|im_end|>"), talk
        assert api.value("rollmesh_agents_drift_total", outcome="forked") == 0


async def test_a_client_that_takes_one_call_at_most_gets_the_first_one_and_goes_on_there(tools_mesh: AgentMesh) -> None:
    """LlamaIndex asks so by default, and smolagents for a call in every answer."""
    async with tools_mesh.api() as api, http_of(api) as http:
        for streamed in (False, True):
            told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
            wishes = {"parallel_tool_calls": False, "tool_choice": "required"}
            async with api.client(api_key=told["api_key"]) as client:
                first = await answer(client, told, [QUESTION], streamed, **wishes)
                (call,) = first.message.tool_calls
                assert json.loads(call.function.arguments) == {"a": 2, "b": 3}
                echo = first.message.model_dump(include={"role", "content", "tool_calls"})
                await answer(client, told, [QUESTION, echo, result_of(call)], streamed, **wishes)
            assert (await state(http, told["id"]))["drift_count"] == 0
            assert (await http.delete(f"/sessions/{told['id']}")).status_code == 204


async def answer(
    client: openai.AsyncOpenAI, told: dict[str, Any], messages: list[Any], streamed: bool, **wishes: Any
) -> Any:
    """One call's choice, put together by the official client where it is streamed."""
    asked: dict[str, Any] = {
        "model": told["model"], "messages": messages, "tools": [ADD], "extra_body": {"return_token_ids": True},
        **wishes,
    }  # fmt: skip
    if not streamed:
        return (await client.chat.completions.create(**asked)).choices[0]
    ids: list[int] = []
    async with client.chat.completions.stream(**asked) as stream:
        async for event in stream:
            if event.type == "chunk" and event.chunk.choices:
                ids += event.chunk.choices[0].model_extra.get("token_ids", [])
        choice = (await stream.get_final_completion()).choices[0]
    choice.model_extra["token_ids"] = ids
    return choice


async def test_a_client_that_renders_for_itself_sends_and_gets_token_ids(tools_mesh: AgentMesh) -> None:
    """The client of the package renderers, with which prime-rl and verifiers train, finds all that it reads."""
    renderer: Any = create_renderer(NamedTokenizer(tools_mesh.tokenizer), config_from_name("qwen3"))
    async with tools_mesh.api() as api, http_of(api) as http:
        told = (await http.post("/sessions", json={"wait_seconds": 90})).json()
        messages: list[Any] = [QUESTION]
        contexts, answers = [], []
        async with api.client(base_url=f"{api.url}/sessions/{told['id']}/v1") as client:
            for results in (("5", "five"), ()):
                prompt = None
                sampling = {"max_tokens": 100}
                if contexts:
                    sampling["routed_experts_prompt_start"] = len(contexts[0])  # as the train client of verifiers
                    bridged = renderer.bridge_to_next_turn(contexts[0], answers[0], messages[-2:], tools=[ADD])
                    prompt = bridged.token_ids
                answer = await generate(
                    client=client, renderer=renderer, messages=messages, model=told["model"], tools=[ADD],
                    prompt_ids=prompt, sampling_params=sampling, cache_salt="7", priority=0,
                )  # fmt: skip
                contexts.append(answer["prompt_ids"])
                answers.append(answer["completion_ids"])
                assert all(logprob <= 0 for logprob in answer["completion_logprobs"])
                for call, result in zip(answer["tool_calls"], results, strict=True):
                    messages.append({"role": "tool", "tool_call_id": call.id or "c", "content": result})
            assert (answer["content"], answer["finish_reason"]) == ("It is 5.", "stop")
        with pytest.raises(openai.BadRequestError) as refused:
            async with api.client() as client:
                body = {"model": told["model"], "token_ids": [1, 2], "sampling_params": {"stop_token_ids": [7]}}
                await client.post(f"{api.url}/inference/v1/generate", cast_to=object, body=body)
        assert refused.value.param == "sampling_params.stop_token_ids"
        assert (await state(http, told["id"]))["drift_count"] == 0
        await http.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})
        assert (await state(http, told["id"]))["state"] == "rewarded"
