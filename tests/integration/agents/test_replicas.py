"""Two replicas of the agents service: a session is in one of them, and its requests may reach any."""

import asyncio
import json
import signal
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from rollmesh.agents.agent_session import AgentSession
from rollmesh.runtime.addresses import free_port

from ...kit.certificates import Authority
from .agent_client import Agent, http_of, state
from .agent_mesh import TOKEN, AgentMesh, Api, agents_process

NAMED = {"agent": {"contexts": "free", "open_on_first_call": True}}


@asynccontextmanager
async def two(mesh: AgentMesh) -> AsyncIterator[tuple[Api, httpx.AsyncClient, Api, httpx.AsyncClient]]:
    """Two replicas, each with a client."""
    async with mesh.api(0) as first, mesh.api(1) as second, http_of(first) as at_first, http_of(second) as at_second:
        yield first, at_first, second, at_second


def seen_at(agent: Agent, api: Api, **client: Any) -> Agent:
    """The same conversation, whose calls reach a replica from now on."""
    other = Agent(api, agent.told, **client)
    other.messages = agent.messages
    return other


async def test_requests_of_a_session_reach_its_replica_from_the_other_one(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with two(mesh) as (first, at_first, second, at_second):
        agent, other = await Agent.open(first, at_first), await Agent.open(second, at_second)
        there = seen_at(agent, second)
        told = [await agent.turn(), await there.turn(), await agent.turn()]
        call = {"model": mesh.config.name, "messages": agent.messages, "max_tokens": 20}
        async with second.client(api_key=agent.told["api_key"]) as by_key:
            text = [
                event.choices[0].delta.content or ""
                async for event in await by_key.chat.completions.create(**call, stream=True)
            ]
        again = {"x-stainless-retry-count": "1"}
        async with second.client(base_url=f"{second.url}/sessions/{agent.id}/v1") as by_path:
            whole = await by_path.chat.completions.create(**call, extra_headers=again)
        assert whole.choices[0].message.content == "".join(text), "the retry of a call at another replica"
        assert len({answer.model_extra["rollmesh"]["trajectory"] for answer in [*told, whole]}) == 1
        assert await state(at_second, agent.id) == {
            **await state(at_first, agent.id), "idle_seconds_left": pytest.approx(600, abs=60)
        }  # fmt: skip
        for http in (at_first, at_second):
            assert {each["id"] for each in (await http.get("/sessions")).json()["data"]} == {agent.id, other.id}
        own = [api.value("rollmesh_agents_calls_total", endpoint="chat", recorded="yes", outcome="answered")
               for api in (first, second)]  # fmt: skip
        assert own == [5, 0], "a call is counted where it is answered"
        # Neither an unknown session nor a request that was forwarded already goes round in circles.
        assert (await at_second.get(f"/sessions/ses-{0:032x}")).status_code == 404
        stray = await at_second.get(f"/sessions/{agent.id}", headers={"X-Rollmesh-Forwarded": "1"})
        assert (stray.status_code, stray.json()["error"]["code"]) == (503, "session_not_known_yet")
        wrong_key = {"Authorization": f"Bearer {agent.told['api_key']}"}
        for path in (f"/sessions/{agent.id}/reward", f"/sessions/{other.id}/reward"):
            assert (await at_second.post(path, json={"reward": 1.0}, headers=wrong_key)).status_code == 401
        other_there = seen_at(other, first)
        await other_there.turn()
        for each, http in ((agent, at_second), (other, at_first)):
            posts = [await http.post(f"/sessions/{each.id}/reward", json={"reward": 1.0}) for _ in range(2)]
            assert [post.status_code for post in posts] == [200, 200]
            changed = await http.post(f"/sessions/{each.id}/reward", json={"reward": 0.5})
            assert changed.json()["error"]["code"] == "already_rewarded"
        left = await Agent.open(first, at_first)
        assert (await at_second.delete(f"/sessions/{left.id}")).status_code == 204
        assert (await state(at_first, left.id))["state"] == "given_up"
    assert [t.shaped_reward for t in (await mesh.batch(1)).groups[0].trajectories] == [1.0, 1.0]
    totals = (await mesh.store.mesh.counts()).totals
    assert (totals["scored_total"], totals.get("forks_total", 0)) == (2, 0)


async def test_requests_are_forwarded_between_replicas_that_speak_tls(
    make_mesh: Callable[..., Any], tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "authority")
    mesh: AgentMesh = await make_mesh(security={"tls": authority.issue("agents").section()})
    trusted = ssl.create_default_context(cafile=str(authority.file))
    async with mesh.api(0) as first, mesh.api(1) as second:
        assert second.url.startswith("https://")
        async with http_of(first, trusted) as at_first, http_of(second, trusted) as at_second:
            told = (await at_first.post("/sessions", json={"wait_seconds": 90})).json()
            call = {"model": told["model"], "messages": told["messages"], "max_tokens": 8}
            headers = {"X-Rollmesh-Session": told["id"]}
            whole = (await at_second.post("/chat/completions", json=call, headers=headers)).json()
            assert whole["rollmesh"]["session"] == told["id"]
            again = {**headers, "x-stainless-retry-count": "1"}
            async with at_second.stream(
                "POST", "/chat/completions", json={**call, "stream": True}, headers=again
            ) as stream:
                events = [json.loads(line[6:]) async for line in stream.aiter_lines() if line.startswith("data: {")]
            text = "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
            assert text == whole["choices"][0]["message"]["content"]
            posted = await at_second.post(f"/sessions/{told['id']}/reward", json={"reward": 1.0})
            assert (posted.status_code, (await state(at_first, told["id"]))["state"]) == (200, "rewarded")


async def test_a_stream_abandoned_at_the_other_replica_frees_the_session(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.1]]})
    async with two(mesh) as (first, at_first, second, _):
        agent = await Agent.open(first, at_first)
        session = first.service.agent_parts.session_manager.find(agent.id)
        assert isinstance(session, AgentSession)
        call = {"model": mesh.config.name, "messages": agent.messages, "max_tokens": 380}
        there = seen_at(agent, second)
        async with await there.client.chat.completions.create(**call, stream=True) as stream:
            await anext(stream)
            assert session.lock.locked()
        await mesh.until("the session is free", lambda: not session.lock.locked())
        second.shutdown.set()  # a stream at a replica that stops ends with the reason
        with pytest.raises(openai.APIError) as stopped:
            async for _ in await there.client.chat.completions.create(**call, stream=True):
                pass
        assert stopped.value.code == "shutting_down"
        await mesh.until("the session is free again", lambda: not session.lock.locked())


async def test_one_session_has_a_name_that_two_replicas_open_at_once(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(rollout=NAMED)
    await mesh.store.settings.set_user_paused(True)
    async with two(mesh) as (first, at_first, second, _), AsyncExitStack() as stack:
        call: dict[str, Any] = {
            "model": mesh.config.name,
            "messages": [{"role": "user", "content": "a?"}],
            "max_tokens": 4,
            "extra_headers": {"X-Session-ID": "episode 7"},
        }
        clients = [await stack.enter_async_context(api.client(max_retries=30)) for api in (first, second)]
        calls = [asyncio.create_task(client.chat.completions.create(**call)) for client in clients]
        managers = [api.service.agent_parts.session_manager for api in (first, second)]
        await mesh.until("both wait for a prompt", lambda: all(manager.waiting.wanted() for manager in managers))
        await mesh.store.settings.set_user_paused(False)
        answers = await asyncio.gather(*calls)
        assert len({answer.model_extra["rollmesh"]["session"] for answer in answers}) == 1
        (session,) = (await at_first.get("/sessions")).json()["data"]
        assert session["name"] == "episode 7"
        assert sum(api.value("rollmesh_agents_sessions_opened_total") for api in (first, second)) == 1

        async def one_is_leased() -> bool:
            return (await mesh.store.mesh.counts()).trajectories["leased"] == len(session["trajectories"])

        await mesh.until("the other prompt is given back", one_is_leased)


async def test_a_replica_that_stops_hands_each_session_to_one_other_whole(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 2})
    async with mesh.api(1) as second, mesh.api(2) as third, http_of(second) as http, http_of(third) as at_third:
        async with mesh.api(0) as first, http_of(first) as at_first:
            agents = [await Agent.open(first, at_first) for _ in range(4)]
            for agent in agents:
                await agent.turn()
            for agent in agents[:2]:
                agent.messages[1] = {"role": "assistant", "content": "a summary"}
                await agent.turn()
        for number, old in enumerate(agents):
            agent = seen_at(old, (second, third)[number % 2], max_retries=30)
            await agent.turn()
            kept = await state(http, agent.id)
            assert (kept["drift_count"], len(kept["trajectories"])) == ((1, 2) if number < 2 else (0, 1))
            assert (await at_third.post(f"/sessions/{agent.id}/reward", json={"reward": number})).status_code == 200
    rewards = [t.shaped_reward for g in (await mesh.batch(1)).groups for t in g.trajectories]
    assert sorted(rewards) == [0.0, 0.0, 1.0, 1.0, 2.0, 3.0]
    assert (await mesh.store.mesh.counts()).totals.get("restarts_total", 0) == 0


async def test_a_call_in_a_replica_that_stood_still_is_answered_where_its_session_is_now(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(
        rollout={"partial_save_tokens": 48}, generator={"pace": [[1, 0.02]]}, store={"session_ttl_seconds": 3.0}
    )
    ports = [free_port() for _ in range(2)]
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with (
        httpx.AsyncClient(base_url=urls[1], headers=headers, trust_env=False, timeout=120) as http,
        AsyncOpenAI(base_url=urls[0], api_key=TOKEN, max_retries=60) as client,
        agents_process(mesh, ports[0]) as first,
        agents_process(mesh, ports[1]),
    ):
        told = dict(await client.post("/sessions", cast_to=object, body={"wait_seconds": 90}))  # type: ignore[call-overload]

        async def tokens() -> int:
            return sum(each["tokens"] for each in (await http.get(f"/sessions/{told['id']}")).json()["trajectories"])

        async def is_taken_over() -> bool:
            seen = await http.get(f"/sessions/{told['id']}", headers={"X-Rollmesh-Forwarded": "1"})
            return seen.status_code == 200

        asked = {"model": mesh.config.name, "messages": told["messages"], "max_tokens": 200}
        call = client.chat.completions.create(**asked, extra_headers={"X-Rollmesh-Session": told["id"]})
        answer = asyncio.create_task(call)
        while await tokens() < 60:
            await asyncio.sleep(0.05)
        first.send_signal(signal.SIGSTOP)
        await mesh.until("the other replica has the session", is_taken_over)
        first.send_signal(signal.SIGCONT)
        assert (await answer).model_extra["rollmesh"]["session"] == told["id"]
    assert (await mesh.store.mesh.counts()).totals.get("restarts_total", 0) == 0


async def test_nothing_is_sent_to_the_address_of_a_replica_that_is_gone(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api(1) as second, http_of(second) as http:
        async with mesh.api(0) as first, http_of(first) as at_first:
            agent = await Agent.open(first, at_first)
            await agent.turn()
            assert (await at_first.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})).status_code == 200
            port = httpx.URL(first.url).port
        strangers = list[bytes]()

        async def stranger(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            strangers.append(await reader.read(65536))
            writer.close()

        async with await asyncio.start_server(stranger, "127.0.0.1", port):
            again = await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})
        assert (again.status_code, strangers) == (404, []), "another process may have the address by now"


async def test_the_sessions_of_a_killed_replica_continue_at_the_other_one(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        rollout={"partial_save_tokens": 48, **NAMED},
        schedule={"groups_per_batch": 1},
        generator={"pace": [[1, 0.02]]},
        store={"session_ttl_seconds": 5.0},
    )
    ports = [free_port() for _ in range(2)]
    urls = [f"http://127.0.0.1:{port}/v1" for port in ports]
    headers = {"Authorization": f"Bearer {TOKEN}"}
    name = {"extra_headers": {"X-Session-ID": "an episode"}}
    async with (
        httpx.AsyncClient(base_url=urls[1], headers=headers, trust_env=False, timeout=120) as http,
        AsyncOpenAI(base_url=urls[0], api_key=TOKEN, max_retries=60) as at_first,
        AsyncOpenAI(base_url=urls[1], api_key=TOKEN, max_retries=60) as client,
        agents_process(mesh, ports[0]) as first,
        agents_process(mesh, ports[1]),
    ):
        told = dict(await at_first.post("/sessions", cast_to=object, body={"wait_seconds": 90}))  # type: ignore[call-overload]
        asked = {"model": mesh.config.name, "messages": [{"role": "user", "content": "go on"}], "max_tokens": 8}
        named = (await at_first.chat.completions.create(**asked, **name)).model_extra["rollmesh"]["session"]
        call: dict[str, Any] = {
            **asked,
            "max_tokens": 220,
            "extra_headers": {"X-Rollmesh-Session": told["id"]},
            "extra_body": {"return_token_ids": True},
        }
        ids: list[int] = []
        with pytest.raises(openai.APIError) as broken:
            async for event in await client.chat.completions.create(**call, stream=True):
                ids += event.choices[0].token_ids if event.choices and event.choices[0].model_extra else []
                if len(ids) > 90:
                    first.send_signal(signal.SIGKILL)
        assert broken.value.code == "session_not_known_yet"
        assert first.wait(60) == -signal.SIGKILL and 90 < len(ids) < 220
        early = await http.post("/chat/completions", json=asked, headers={"X-Session-ID": "an episode"})
        assert (early.status_code, early.json()["error"]["code"]) == (503, "session_not_known_yet")
        await continued(http, told["id"])
        again = await client.chat.completions.create(**asked, **name, extra_body={"return_token_ids": True})
        assert again.model_extra["rollmesh"]["session"] == named, "its name is not opened again"
        whole = (await client.chat.completions.create(**call)).choices[0].token_ids  # type: ignore[attr-defined]
        assert whole[: len(ids)] == ids, "the same policy samples the lost tokens again as they were"
        for number, session in enumerate((told["id"], named)):
            assert (await http.post(f"/sessions/{session}/reward", json={"reward": number})).status_code == 200
    assert [t.shaped_reward for t in (await mesh.batch(1)).groups[0].trajectories] == [0.0, 1.0]
    counts = await mesh.store.mesh.counts()
    assert (counts.totals["scored_total"], counts.totals.get("restarts_total", 0)) == (2, 0)


async def continued(http: httpx.AsyncClient, session: str) -> None:
    """Wait until a replica has taken a session over; it is not unknown before."""
    deadline = time.monotonic() + 120
    while (seen := await http.get(f"/sessions/{session}")).status_code != 200:
        assert time.monotonic() < deadline
        assert seen.json()["error"]["code"] == "session_not_known_yet", seen.text
        await asyncio.sleep(0.1)
