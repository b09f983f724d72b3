"""The API while Redis is away, while no generator serves, and while the service itself stops."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from rollmesh.agents import recorded_calls, unrecorded
from rollmesh.mesh import Cursor
from rollmesh.store import EmbeddedOptions, EmbeddedServer

from .agent_client import Agent, http_of, state
from .agent_mesh import AgentMesh, agent_mesh


def error_of(answer: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


@pytest.fixture
def own(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A Redis that the test may kill."""
    server = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    server.start()
    yield server
    server.kill()


async def test_an_outage_of_redis_holds_sessions_back_and_loses_nothing(tmp_path: Path, own: EmbeddedServer) -> None:
    async with (
        agent_mesh(tmp_path / "outage", own, retry_seconds=1.0) as mesh, mesh.api() as api, http_of(api) as http,
    ):  # fmt: skip
        agents = [await Agent.open(api, http) for _ in range(2)]
        first = [await agent.turn() for agent in agents]
        keys, (kept,) = mesh.store.connection.keys, (await state(http, agents[1].id))["trajectories"]
        # As if the new server had lost the last second.
        await mesh.store.connection.command("HDEL", keys.of("trajectory", kept["id"]), "agent", "snapshot")
        await mesh.store.connection.command("DEL", keys.of("agent", agents[1].id))
        await asyncio.to_thread(own.kill)
        call = asyncio.create_task(agents[0].turn("and in an outage?"))
        for method, path in (("GET", "/models"), ("POST", "/sessions")):
            refused = await http.request(method, path, json={"wait_seconds": 0} if method == "POST" else None)
            assert (refused.status_code, error_of(refused)["code"]) == (503, "store_unavailable"), refused.text
            assert int(refused.headers["retry-after"]) >= 1
        assert not call.done()
        await asyncio.to_thread(own.start)
        async with asyncio.timeout(180):
            answer = await call
        assert answer.model_extra["rollmesh"]["trajectory"] == first[0].model_extra["rollmesh"]["trajectory"]
        async with mesh.api(1) as other, http_of(other) as elsewhere:

            async def known() -> bool:
                return (await elsewhere.get(f"/sessions/{agents[1].id}")).status_code == 200

            await mesh.until("the other replica finds the silent session", known)
        for number, agent in enumerate(agents):
            assert (await state(http, agent.id))["drift_count"] == 0
            done = await http.post(f"/sessions/{agent.id}/reward", json={"reward": number})
            assert done.status_code == 200, done.text
        # Nobody plays the trainer that states its step to the new server: nothing is cut, and all of it is there.
        found = (await mesh.store.mesh.counts()).trajectories
        assert (found["scored"], found["leased"], found["partial"]) == (2, 0, 0), found


async def test_a_context_that_drifts_while_redis_recovers_waits_and_costs_no_tokens(
    tmp_path: Path, own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        agent_mesh(tmp_path / "drifts", own, retry_seconds=1.0) as mesh, mesh.api() as api, http_of(api) as http,
    ):  # fmt: skip
        agent = await Agent.open(api, http)
        await agent.turn()
        await asyncio.to_thread(own.kill)
        await asyncio.to_thread(own.start)
        await agent.turn()
        (before,) = (await state(http, agent.id))["trajectories"]
        agent.messages[1] = {"role": "assistant", "content": "a summary of what I said"}
        with monkeypatch.context() as patch:
            patch.setattr(recorded_calls, "_PARKED_SECONDS", 1.0)
            with pytest.raises(openai.InternalServerError, match="no other trajectory can open") as refused:
                await agent.turn()
        assert (refused.value.status_code, refused.value.code) == (503, "session_parked")
        await mesh.store.training.reassert(mesh.trainer, 0, 0, [], [], Cursor())
        await agent.turn()
        seen = await state(http, agent.id)
        assert seen["drift_count"] == 1
        first, _ = seen["trajectories"]
        assert (first["id"], first["tokens"]) == (before["id"], before["tokens"])
        assert (await mesh.store.mesh.counts()).totals.get("restarts_total", 0) == 0


async def test_while_no_generator_serves_calls_wait_and_are_then_told_so(
    tmp_path: Path, own: EmbeddedServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unrecorded, "_UNSERVED_SECONDS", 1.0)
    options = {"rollout": {"program": "single_turn"}, "schedule": {"pool_size": 4}}
    async with agent_mesh(tmp_path / "nobody", own, **options) as mesh, mesh.api() as api, http_of(api) as http:
        await mesh.store.settings.set_user_paused(True)
        generator = mesh.tasks.pop(0)
        generator.cancel()
        await asyncio.gather(generator, return_exceptions=True)

        async def none_serves() -> bool:
            return not any(g.serving for g in await mesh.store.generators.live())

        await mesh.until("no generator", none_serves)
        run, begun = mesh.config.name, time.monotonic()
        for stream in (False, True):
            answer = await http.post("/completions", json={"model": run, "prompt": "the", "stream": stream})
            assert (answer.status_code, error_of(answer)["code"]) == (503, "no_generator"), answer.text
            assert int(answer.headers["retry-after"]) >= 1
        assert time.monotonic() - begun < 45
        assert api.value("rollmesh_agents_running_calls") == 0
        assert [m["id"] for m in (await http.get("/models")).json()["data"]] == [run]


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
