"""A service that stops tells the calls under way, and waits for none of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from .agent_mesh import TOKEN, AgentMesh, Api


def http_of(api: Api) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=f"{api.url}/v1", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=120, trust_env=False
    )


async def opened(http: httpx.AsyncClient) -> dict[str, Any]:
    answer = await http.post("/sessions", json={"wait_seconds": 90})
    assert answer.status_code == 201, answer.text
    return answer.json()


async def streamed(client: openai.AsyncOpenAI, **call: Any) -> str:
    """Text of a streamed answer."""
    stream = await client.chat.completions.create(stream=True, **call)
    return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])


async def test_calls_under_way_are_told_that_the_service_stops(
    make_mesh: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.1]]})  # an answer of 380 tokens takes 38 s
    async with mesh.api(grace_seconds=15) as api, http_of(api) as http:
        sessions = [await opened(http) for _ in range(2)]
        whole, stream = (api.client(default_headers={"X-Rollmesh-Session": s["id"]}) for s in sessions)
        call = {"model": mesh.config.name, "max_tokens": 380}
        calls = [
            asyncio.create_task(whole.chat.completions.create(messages=sessions[0]["messages"], **call)),
            asyncio.create_task(streamed(stream, messages=sessions[1]["messages"], **call)),
        ]

        async def both_have_tokens() -> bool:
            seen = [(await http.get(f"/sessions/{s['id']}")).json()["trajectories"] for s in sessions]
            return all(t and t[0]["tokens"] for t in seen)

        await mesh.until("tokens of both", both_have_tokens)
        await mesh.store.settings.set_user_paused(True)
        waiting = asyncio.create_task(http.post("/sessions", json={"wait_seconds": 60}))
        await mesh.until("an agent that waits", lambda: api.service.agents.session_manager.wanted())  # type: ignore[union-attr]
        with caplog.at_level(logging.INFO, logger="uvicorn.error"):
            api.shutdown.set()
            errors = await asyncio.gather(*calls, return_exceptions=True)
            answer = await waiting
        assert isinstance(errors[0], openai.InternalServerError)
        assert (errors[0].status_code, errors[0].code) == (503, "shutting_down")
        assert int(errors[0].response.headers["retry-after"]) >= 1
        # A stream has had its status already: the error is its last event.
        assert isinstance(errors[1], openai.APIError) and errors[1].code == "shutting_down"
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutting_down")
        assert not [r for r in caplog.records if r.levelno >= logging.ERROR]
        for client in (whole, stream):
            await client.close()
    # Nothing is lost by it: what was written is saved for the next service.
    view = await mesh.store.mesh.view()
    assert view.partial == 2
    assert (await mesh.store.mesh.counts()).dead_letters == 0


async def test_a_run_that_needs_no_more_rollouts_ends_its_calls_at_once(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        generator={"pace": [[1, 0.3]]}, schedule={"groups_per_batch": 1, "pool_size": 3}, trainer={"train_steps": 1}
    )
    async with mesh.api(grace_seconds=15) as api, http_of(api) as http:
        sessions = [await opened(http) for _ in range(3)]
        client = api.client(default_headers={"X-Rollmesh-Session": sessions[2]["id"]})
        late = asyncio.create_task(
            client.chat.completions.create(model=mesh.config.name, messages=sessions[2]["messages"], max_tokens=380)
        )
        for number, session in enumerate(sessions[:2]):
            headers = {"X-Rollmesh-Session": session["id"]}
            body = {"model": mesh.config.name, "messages": session["messages"], "max_tokens": 2}
            assert (await http.post("/chat/completions", json=body, headers=headers)).status_code == 200
            assert (await http.post(f"/sessions/{session['id']}/reward", json={"reward": number})).status_code == 200
        await mesh.batch(1)
        assert not late.done()
        api.shutdown.set()
        with pytest.raises(openai.APIStatusError) as told:
            await late
        assert (told.value.status_code, told.value.code) == (410, "run_complete")
        await client.close()
