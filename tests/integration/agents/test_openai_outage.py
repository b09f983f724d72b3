"""The API while Redis is away, and while no generator serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rollmesh.agents import unrecorded
from rollmesh.store import EmbeddedOptions, EmbeddedServer

from .agent_client import Agent, http_of, state
from .agent_mesh import agent_mesh


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
            await agent.aclose()
        # Nobody plays the trainer that states its step to the new server: nothing is cut, and all of it is there.
        found = (await mesh.store.mesh.counts()).trajectories
        assert (found["scored"], found["leased"], found["partial"]) == (2, 0, 0), found


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
