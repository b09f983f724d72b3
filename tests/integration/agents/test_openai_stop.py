"""A service that stops tells the calls under way, and waits for none of them."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import openai
import pytest

from .agent_client import Agent, http_of, state
from .agent_mesh import AgentMesh


async def streamed(client: openai.AsyncOpenAI, **call: Any) -> str:
    """Text of a streamed answer."""
    stream = await client.chat.completions.create(stream=True, **call)
    return "".join([event.choices[0].delta.content or "" async for event in stream if event.choices])


async def test_calls_under_way_are_told_that_the_service_stops(
    make_mesh: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.1]]})  # an answer of 380 tokens takes 38 s
    async with mesh.api(grace_seconds=15) as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        call = {"model": mesh.config.name, "messages": agents[1].messages, "max_tokens": 380}
        calls = [asyncio.create_task(agents[0].turn(max_tokens=380))]
        calls.append(asyncio.create_task(streamed(agents[1].client, **call)))

        async def both_have_tokens() -> bool:
            seen = [(await state(http, agent.id))["trajectories"] for agent in agents]
            return all(t and t[0]["tokens"] for t in seen)

        await mesh.until("tokens of both", both_have_tokens)
        await mesh.store.settings.set_user_paused(True)
        waiting = asyncio.create_task(http.post("/sessions", json={"wait_seconds": 60}))
        await mesh.until("an agent that waits", lambda: api.service.agents.session_manager.waiting.wanted())  # type: ignore[union-attr]
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
        for agent in agents:
            await agent.aclose()
    # Nothing is lost by it: what was written is saved for the next service.
    view = await mesh.store.mesh.view()
    assert view.partial == 2
    assert (await mesh.store.mesh.counts()).dead_letters == 0


async def test_a_run_that_needs_no_more_rollouts_ends_its_calls_at_once(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        generator={"pace": [[1, 0.3]]}, schedule={"groups_per_batch": 1, "pool_size": 3}, trainer={"train_steps": 1}
    )
    async with mesh.api(grace_seconds=15) as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(3)]
        late = asyncio.create_task(agents[2].turn(max_tokens=380))
        for number, agent in enumerate(agents[:2]):
            await agent.turn(max_tokens=2)
            assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": number})).status_code == 200
        await mesh.batch(1)
        assert not late.done()
        api.shutdown.set()
        with pytest.raises(openai.APIStatusError) as told:
            await late
        assert (told.value.status_code, told.value.code) == (410, "run_complete")
        for agent in agents:
            await agent.aclose()
