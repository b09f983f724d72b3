"""Chat and completions through the official client, on a real generator; nothing of it is recorded."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from .agent_client import http_of
from .agent_mesh import AgentMesh

PLAIN = {"rollout": {"program": "single_turn"}, "schedule": {"pool_size": 4}}
QUESTION = [{"role": "user", "content": "the answer is 42?"}]


async def test_the_official_client_gets_models_chat_and_completions(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(**PLAIN)
    async with mesh.api() as api:
        async with api.client() as client:
            run = mesh.config.name
            assert [m.id for m in (await client.models.list()).data] == [run, f"{run}@0"]
            assert (await client.models.retrieve(run)).owned_by == "rollmesh"

            chat = await client.chat.completions.create(
                model=run, messages=QUESTION, max_completion_tokens=12, logprobs=True, n=2, seed=5,
                extra_body={"return_token_ids": True},
            )  # fmt: skip
            assert len(chat.choices) == 2
            prompt = mesh.tokenizer.render_chat(QUESTION).tolist()
            assert chat.usage is not None and chat.usage.prompt_tokens == len(prompt)
            assert chat.model_extra is not None and chat.model_extra["prompt_token_ids"] == prompt
            assert chat.model_extra["rollmesh"] == {"policy_versions": [0]}
            for choice in chat.choices:
                ids = choice.model_extra["token_ids"]  # type: ignore[index]
                assert choice.finish_reason == ("stop" if len(ids) < 12 else choice.finish_reason)
                assert choice.message.role == "assistant"
                assert choice.logprobs is not None and choice.logprobs.content is not None
                assert len(choice.logprobs.content) == len(ids)
                assert all(t.logprob < 0 for t in choice.logprobs.content)
            assert chat.choices[0].model_extra["token_ids"] != chat.choices[1].model_extra["token_ids"]  # type: ignore[index]

            same = await client.completions.create(
                model=f"{run}@0",
                prompt=prompt,
                max_tokens=12,
                logprobs=0,
                seed=5,
                extra_body={"return_token_ids": True},
            )
            assert same.choices[0].model_extra["token_ids"] == chat.choices[0].model_extra["token_ids"]  # type: ignore[index]
            assert same.choices[0].logprobs is not None
            assert same.choices[0].logprobs.token_logprobs == pytest.approx(
                [t.logprob for t in chat.choices[0].logprobs.content]  # type: ignore[union-attr]
            )
        assert api.value("rollmesh_agents_calls_total", endpoint="chat", recorded="no", outcome="answered") == 1
        assert api.value("rollmesh_agents_running_calls") == 0
        assert api.value("rollmesh_agents_answer_tokens_total", recorded="no") > 0


async def test_a_stream_tells_what_the_whole_answer_says(make_mesh: Callable[..., Any]) -> None:
    # Slow enough for the chunks of an answer to come one by one: those that wait are told together.
    mesh: AgentMesh = await make_mesh(**PLAIN, generator={"pace": [[1, 0.01]]})
    run = mesh.config.name
    async with mesh.api() as api, api.client() as client:
        options: dict[str, Any] = {"model": run, "messages": QUESTION, "max_tokens": 60, "seed": 3, "temperature": 0.7}
        whole = await client.chat.completions.create(**options, logprobs=True)
        pieces, reason, usage, logprobs = [], None, None, []
        stream = await client.chat.completions.create(
            **options, stream=True, stream_options={"include_usage": True}, logprobs=True
        )
        async for event in stream:
            usage = event.usage or usage
            for choice in event.choices:
                pieces.append(choice.delta.content or "")
                reason = choice.finish_reason or reason
                if choice.logprobs is not None and choice.logprobs.content:
                    logprobs += [t.logprob for t in choice.logprobs.content]
        assert "".join(pieces) == whole.choices[0].message.content
        assert len([p for p in pieces if p]) > 1, "the beginning is told before the end is known"
        assert reason == whole.choices[0].finish_reason
        assert usage.total_tokens == whole.usage.total_tokens
        assert logprobs == pytest.approx([t.logprob for t in whole.choices[0].logprobs.content])  # type: ignore[union-attr]

        text = whole.choices[0].message.content or ""
        stop = text[len(text) // 2 : len(text) // 2 + 2]
        stopped = await client.chat.completions.create(**options, stop=[stop])
        assert stopped.choices[0].message.content == text[: text.index(stop)]
        assert stopped.choices[0].finish_reason == "stop"

        raw = await client.completions.with_raw_response.create(
            model=run, prompt="the answer", max_tokens=4, stream=True
        )
        body = await raw.http_response.aread()
        assert body.endswith(b"data: [DONE]\n\n")
        assert raw.headers["content-type"].startswith("text/event-stream")


async def test_every_refusal_names_the_field_in_the_shape_that_openai_clients_know(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(**PLAIN)
    run = mesh.config.name
    good: dict[str, Any] = {"model": run, "messages": QUESTION, "max_tokens": 2}
    image = {"role": "user", "content": [{"type": "image_url"}]}
    cases: list[tuple[dict[str, Any], int, str, str]] = [
        ({"frobnicate": 1}, 400, "frobnicate", "unknown parameter"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.function", "required field is missing"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, 400, "tools", "set agents.renderer"),
        ({"top_logprobs": 2, "logprobs": True}, 400, "top_logprobs", "only the log-probability of the sampled token"),
        ({"temperature": -1}, 400, "temperature", "greater than or equal to 0 (got -1)"),
        ({"stop": [""]}, 400, "stop.0", "at least 1 character"),
        ({"messages": [image]}, 400, "messages.0.content.0.type", "text"),
        ({"model": "gpt-4"}, 404, "model", f"it is '{run}'"),
        ({"model": f"{run}@7"}, 404, "model", "policy version 7 does not exist (published are 0 to 0)"),
        ({"messages": [{"role": "user", "content": "the " * 600}]}, 400, "messages", "max_context_tokens=512"),
    ]
    json_type = {"Content-Type": "application/json"}
    async with mesh.api() as api, http_of(api) as http:
        for change, status, param, words in cases:
            answer = await http.post("/chat/completions", json={**good, **change})
            error = answer.json()["error"]
            assert (answer.status_code, error["param"]) == (status, param), (change, error)
            assert words in error["message"], (change, error)
        neutral = {"tools": [], "presence_penalty": 0, "logit_bias": {}, "response_format": {"type": "text"}}
        assert (await http.post("/chat/completions", json={**good, **neutral})).status_code == 200
        text = {"model": run, "prompt": "the", "max_tokens": 1}
        for path in ("//v1/completions", "/v1//completions", "/v1/completions/"):  # a base URL may end in a slash
            assert (await http.post(f"{api.url}{path}", json=text)).status_code == 200
        refusals = [
            (401, await http.get("/models", headers={"Authorization": "Bearer wrong"}), ""),
            (404, await http.get("/nothing"), ""),
            (405, await http.get("/completions"), ""),
            (413, await http.post("/completions", content=b"x" * (mesh.config.gateway.max_request_bytes + 1)), ""),
            (400, await http.post("/completions", json={}, headers={"Host": "evil.example.org"}), ""),
            (
                400,
                await http.post("/completions", json={"model": run, "prompt": [1, 99999]}),
                "prompt[1]: token id 99999",
            ),
            (400, await http.post("/completions", content=b"{", headers=json_type), "not valid JSON"),
            (400, await http.post("/sessions"), "rollout.program=agent"),
        ]
        assert api.value("rollmesh_agents_refused_tokens_total") == 1
        async with api.client(api_key="wrong") as client:
            with pytest.raises(openai.AuthenticationError):
                await client.chat.completions.create(**good)
    assert refusals[0][1].headers["www-authenticate"] == "Bearer"
    for status, answer, words in refusals:
        error = answer.json()["error"]
        assert (answer.status_code, set(answer.json())) == (status, {"error"})
        assert set(error) == {"message", "type", "param", "code"} and words in error["message"], answer.text
        assert error["type"] == ("authentication_error" if status == 401 else "invalid_request_error")
        assert status != 401 or error["code"] == "invalid_api_key"


async def test_a_published_version_that_no_generator_serves_is_told_how_to_be_pinned(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(**PLAIN)
    await mesh.publish()
    await mesh.serving(1)
    async with mesh.api() as api, api.client() as client:
        with pytest.raises(openai.InternalServerError, match="pin it first: rollmesh pin RUN --version 0") as refused:
            await client.completions.create(model=f"{mesh.config.name}@0", prompt="the", max_tokens=2)
        assert (refused.value.status_code, refused.value.code) == (503, "version_not_served")


LONG: dict[str, Any] = {"messages": QUESTION, "max_tokens": 300, "temperature": 2.0}


async def running(mesh: AgentMesh) -> int:
    """Calls in the generators, as of their last heartbeats."""
    return sum(g.running_count + g.waiting_count for g in await mesh.store.generators.live())


async def begun(mesh: AgentMesh, client: openai.AsyncOpenAI) -> asyncio.Task[Any]:
    """A call that was seen to run: a short answer may be over before the next heartbeat."""
    for _ in range(20):
        call = asyncio.create_task(
            client.chat.completions.create(model=mesh.config.name, extra_body={"return_token_ids": True}, **LONG)
        )

        async def seen(call: asyncio.Task[Any] = call) -> bool:
            return call.done() or await running(mesh) > 0

        await mesh.until("the call is running", seen)
        if not call.done():
            return call
    raise AssertionError("no call was seen to run")


async def hang_up(mesh: AgentMesh, client: openai.AsyncOpenAI, stream: bool) -> None:
    """Begin a call and leave; the generator must be free after it."""
    if stream:
        events = await client.chat.completions.create(model=mesh.config.name, stream=True, **LONG)
        await anext(events.__aiter__())
        await events.close()
    else:
        call = await begun(mesh, client)
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    await mesh.until("the slot is free", lambda: _none(running(mesh)))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_hangs_up_frees_the_generator(make_mesh: Callable[..., Any], stream: bool) -> None:
    mesh: AgentMesh = await make_mesh(**PLAIN, generator={"pace": [[1, 0.01]]})
    async with mesh.api() as api, api.client() as client:
        await mesh.store.settings.set_user_paused(True)

        def cancelled() -> float:
            labels = {"endpoint": "chat", "recorded": "no", "outcome": "cancelled"}
            return api.value("rollmesh_agents_calls_total", **labels)

        for _ in range(20):  # an answer may be over before its client hangs up
            await hang_up(mesh, client, stream)
            await mesh.until("the end", lambda: api.value("rollmesh_agents_running_calls") == 0)
            if cancelled():
                break
        assert cancelled() == 1


async def test_a_reload_does_not_cut_an_answer(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(**PLAIN, generator={"pace": [[1, 0.01]]})
    async with mesh.api() as api, api.client() as client:
        await mesh.store.settings.set_user_paused(True)
        answers = []
        for _ in range(20):
            call = await begun(mesh, client)
            await mesh.publish()
            answers.append(await call)
            await mesh.serving(mesh.versions - 1)
            await mesh.until("the slot is free", lambda: _none(running(mesh)))
            if len(answers[-1].model_extra["rollmesh"]["policy_versions"]) > 1:
                break
        versions = [a.model_extra["rollmesh"]["policy_versions"] for a in answers]
        assert any(len(v) > 1 for v in versions), versions
        for answer in answers:
            ids = answer.choices[0].model_extra["token_ids"]
            assert len(ids) == 300 or ids[-1] in mesh.tokenizer.eos_token_ids
            assert np.all(np.array(ids) < mesh.tokenizer.vocab_size)


async def _none(count: Any) -> bool:
    return await count == 0
