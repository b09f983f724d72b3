"""Agents that wait for a prompt or refuse to, fall silent, or are held by a pause."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import httpx
import openai
import pytest

from rollmesh.agents.agent_session import AgentSession

from .agent_client import Agent, above, http_of, state
from .agent_mesh import AgentMesh


async def test_a_pause_holds_calls_back_and_loses_nothing(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.02]]})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        call = asyncio.create_task(agent.turn(max_tokens=200))

        async def tokens() -> int:
            return (await state(http, agent.id))["trajectories"][0]["tokens"]

        await mesh.until("some tokens", lambda: above(tokens(), 10))
        session = api.service.agent_parts.session_manager.find(agent.id)
        assert isinstance(session, AgentSession)
        session.last_use -= 2 * session.idle_seconds  # as if the call had lasted longer than an agent may be silent
        await mesh.store.settings.set_user_paused(True)

        async def idle() -> bool:
            return all(g.running_count == 0 for g in await mesh.store.generators.live())

        await mesh.until("the generator is idle", idle)
        assert not call.done()
        full = await http.post("/sessions", json={"wait_seconds": 0.2})
        assert full.status_code == 429 and "paused by an operator" in full.json()["error"]["message"]
        assert int(full.headers["retry-after"]) >= 1
        await mesh.store.settings.set_user_paused(False)
        answer = await call
        ids = answer.choices[0].model_extra["token_ids"]
        assert len(ids) == 200 or ids[-1] in mesh.tokenizer.eos_token_ids
        await agent.turn()
        assert (await state(http, agent.id))["drift_count"] == 0


async def test_an_agent_that_does_not_wait_gets_a_prompt_that_is_there_or_the_reason(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1, "pool_size": 2})
    async with mesh.api() as api, http_of(api) as http:

        async def prompts_wait() -> bool:
            return (await mesh.store.mesh.counts()).trajectories["pending"] >= 2

        async def no_wait() -> httpx.Response:
            return await http.post("/sessions", json={"wait_seconds": 0})

        await mesh.until("two prompts wait", prompts_wait)
        opened = [await no_wait() for _ in range(2)]
        assert [answer.status_code for answer in opened] == [201, 201], [answer.text for answer in opened]
        full = await no_wait()
        assert full.status_code == 429
        assert "the pool is full: sessions hold 2 of 2 trajectories" in full.json()["error"]["message"]
        await http.delete(f"/sessions/{opened[0].json()['id']}")
        await mesh.until("its prompt waits again", lambda: _pending(mesh))
        assert (await no_wait()).status_code == 201


async def test_agents_that_wait_for_their_tools_leave_the_pool_to_others_up_to_the_bound(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"pool_size": 1}, rollout={"most_waiting": 2})

    async def waiting() -> int:
        return (await mesh.store.mesh.view(groups=False)).waiting

    async with mesh.api() as api, http_of(api) as http:
        agents: list[Agent] = []
        for _ in range(3):
            agents.append(await Agent.open(api, http))
            await agents[-1].turn()
            await mesh.until("all of them wait for tools", lambda: above(waiting(), len(agents) - 1))
        full = await http.post("/sessions", json={"wait_seconds": 1})
        assert full.status_code == 429
        assert (
            "the pool is full: sessions hold 3 of 3 trajectories: the pool of 1, and beyond it 2 of the 3 that are "
            "between two calls (rollout.most_waiting=2)"
        ) in full.json()["error"]["message"]
        await asyncio.gather(*(agent.turn() for agent in agents))  # all return at once, and none is refused
        assert (await mesh.store.mesh.view(groups=False)).leased == 3
        answer = await http.post(f"/sessions/{agents[0].id}/reward", json={"reward": 1.0})
        assert answer.status_code == 200, answer.text
        agents.append(await Agent.open(api, http))
    view = await mesh.store.mesh.view(groups=False)
    assert (view.leased, view.waiting) == (0, 0), "the service has closed its worker session"


async def _pending(mesh: AgentMesh) -> bool:
    return (await mesh.store.mesh.counts()).trajectories["leased"] < 2


async def test_silent_agents_and_those_that_give_up_make_room_for_others(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        rollout={"agent": {"idle_timeout_seconds": 9.0}}, schedule={"groups_per_batch": 1, "pool_size": 2}
    )
    async with mesh.api() as api, http_of(api) as http:
        silent = await Agent.open(api, http)
        await silent.turn()
        leaver = await Agent.open(api, http)
        await leaver.turn()
        assert (await http.delete(f"/sessions/{leaver.id}")).status_code == 204
        third = await Agent.open(api, http)
        assert third.told["messages"] == leaver.told["messages"]
        begun, shown = time.monotonic(), set[str]()
        while time.monotonic() - begun < 11.0:  # a sign of life now and then keeps a session
            await third.turn(max_tokens=2)
            await asyncio.sleep(0.8)
            shown.add(api.health.waits.text())
        words = ("of 2 sessions had no call for up to ", "rollout.agent.idle_timeout_seconds=9 or by DELETE")
        assert any(all(word in text for word in words) for text in shown), shown
        with pytest.raises(openai.APIStatusError) as gone:
            await silent.turn()
        assert gone.value.status_code == 410 and "silent for longer" in str(gone.value)
        fourth = await Agent.open(api, http)
        assert (await mesh.store.mesh.counts()).totals["restarts_total"] == 2
        for each, reward in ((third, 1.0), (fourth, 0.0)):
            await each.turn(max_tokens=2)
            assert (await http.post(f"/sessions/{each.id}/reward", json={"reward": reward})).status_code == 200
        batch = await mesh.batch(1)
        assert sorted(t.shaped_reward for t in batch.groups[0].trajectories) == [0.0, 1.0]


async def test_an_agent_that_waits_is_told_when_the_run_has_what_it_needs(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(
        schedule={"groups_per_batch": 1, "pool_size": 2, "max_staleness": 1}, trainer={"train_steps": 1}
    )
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        waiting = asyncio.create_task(http.post("/sessions", json={"wait_seconds": 60}))
        for number, agent in enumerate(agents):
            await agent.turn(max_tokens=2)
            await http.post(f"/sessions/{agent.id}/reward", json={"reward": number})
        await mesh.batch(1)
        answer = await waiting
        assert (answer.status_code, answer.json()["error"]["code"]) == (410, "run_complete")
