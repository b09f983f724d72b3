"""An agent of ten lines, run by the service: its rewards are trained, and its faults cost its own trajectories only."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from openai import AsyncOpenAI

from rollmesh.agents.hosted_agent import hosted_agent
from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import load_agent
from rollmesh.types import OutcomeKind

from .agent_mesh import TOKEN, AgentMesh
from .tool_model import ADD, QUESTION

SEEN: Counter[str] = Counter()


def add(call: Any) -> str:
    sent = json.loads(call.function.arguments)
    return str(sent["a"] + sent["b"])


async def adding(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
    messages: list[Any] = [QUESTION]
    while True:
        answer = await client.chat.completions.create(model=row["model"], messages=messages, tools=[ADD])  # type: ignore[list-item]
        messages.append(answer.choices[0].message.model_dump(exclude_none=True))
        calls = answer.choices[0].message.tool_calls or []
        messages += [{"role": "tool", "tool_call_id": call.id, "content": add(call)} for call in calls]
        if not calls:
            return float(messages[-1]["content"] == "It is 5.")


async def faulty(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
    """Every third rollout fails, every third one hangs, and the others are right."""
    SEEN["rollouts"] += 1
    number = SEEN["rollouts"] % 3
    value = await adding(client, row)
    if number == 0:
        raise KeyError("tool server")
    if number == 1:
        await asyncio.Event().wait()
    return value


async def test_a_reward_beside_a_call_that_the_function_left_is_posted_after_it(tools_mesh: AgentMesh) -> None:
    mesh, left = tools_mesh, list[asyncio.Task[Any]]()
    async with mesh.api() as api:
        manager = api.service.agent_parts.session_manager

        async def leaving(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
            """Leave the second call to itself."""
            value = await adding(client, row)
            left.append(asyncio.create_task(adding(client, row)))
            while not manager.find(row["id"]).lock.locked():  # type: ignore[union-attr]
                await asyncio.sleep(0)
            return value

        async with hosted_agent(api.service, api.app, leaving, TOKEN, api.url, api.shutdown):
            batch = await mesh.batch(1)
            assert {t.outcome.value for g in batch.groups for t in g.trajectories if t.outcome is not None} == {1.0}
            api.shutdown.set()
        await asyncio.gather(*left, return_exceptions=True)


def not_async(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
    return 0.0


async def test_rewards_of_the_function_are_trained_with_the_tokens_of_its_calls(tools_mesh: AgentMesh) -> None:
    mesh = tools_mesh
    async with mesh.api() as api, hosted_agent(api.service, api.app, adding, TOKEN, api.url, api.shutdown):
        for step in (1, 2, 3):
            batch = await mesh.batch(step)
            for trajectory in (t for group in batch.groups for t in group.trajectories):
                assert trajectory.outcome is not None and trajectory.outcome.value == 1.0
                text = mesh.tokenizer.decode(trajectory.response_ids, special_tokens=True)
                assert text.endswith("It is 5.<|im_end|>") and "<tool_response>\n5\n</tool_response>" in text
        api.shutdown.set()
    assert api.value("rollmesh_agents_drift_total", outcome="forked") == 0
    counts = await mesh.store.mesh.counts()
    assert counts.totals.get("forks_total", 0) == 0


async def test_a_rollout_that_fails_or_hangs_costs_its_own_trajectory(tools_mesh: AgentMesh) -> None:
    mesh = tools_mesh
    mesh.config.rollout.agent.__dict__["idle_timeout_seconds"] = 3.0
    async with mesh.api() as api, hosted_agent(api.service, api.app, faulty, TOKEN, api.url, api.shutdown):
        kinds: Counter[OutcomeKind] = Counter()
        for step in (1, 2):
            batch = await mesh.batch(step)
            kinds += Counter(t.outcome.kind for g in batch.groups for t in g.trajectories if t.outcome is not None)
        assert kinds[OutcomeKind.SCORED] >= 2
        await mesh.until("a hanging one has ended", lambda: hung(api))
        api.shutdown.set()


async def test_a_function_that_makes_no_call_costs_its_own_prompts_as_often_as_the_run_tries(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(rollout={"max_attempts": 2}, schedule={"groups_per_batch": 1})

    async def sometimes_silent(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
        if row["task"]["answer"] != "0":
            await client.chat.completions.create(model=row["model"], messages=row["messages"], max_tokens=4)
        return 1.0

    async with mesh.api() as api, hosted_agent(api.service, api.app, sometimes_silent, TOKEN, api.url, api.shutdown):
        trained = [t for group in (await mesh.batch(1)).groups for t in group.trajectories]
        assert {t.outcome.value for t in trained if t.outcome is not None} == {1.0}
        assert all("the answer is 0?" not in mesh.tokenizer.decode(t.prompt.token_ids) for t in trained)

        async def both_dead() -> bool:
            return (await mesh.store.mesh.counts()).totals.get("dead_total", 0) >= 2

        await mesh.until("the silent members of the first prompt are dead letters", both_dead)
        assert api.value("rollmesh_agents_sessions_ended_total", how="given_up") >= 4
        api.shutdown.set()


async def test_the_rollouts_of_an_earlier_process_begin_again(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1, "pool_size": 2})
    calls: list[str] = []

    async def hanging(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
        await client.chat.completions.create(model=row["model"], messages=row["messages"], max_tokens=4)
        calls.append(row["id"])
        await asyncio.Event().wait()
        return 0.0

    async def ending(client: AsyncOpenAI, row: Mapping[str, Any]) -> float:
        await client.chat.completions.create(model=row["model"], messages=row["messages"], max_tokens=6)
        calls.append(row["id"])
        return 1.0

    async with mesh.api() as first, hosted_agent(first.service, first.app, hanging, TOKEN, first.url, first.shutdown):
        await mesh.until("every place of the pool has a rollout with an answer", lambda: len(calls) == 2)
        first.shutdown.set()
    assert (await mesh.store.mesh.counts()).trajectories["partial"] == 2
    async with mesh.api() as api, hosted_agent(api.service, api.app, ending, TOKEN, api.url, api.shutdown):
        batch = await mesh.batch(1)
        trained = [t for g in batch.groups for t in g.trajectories]
        assert [t.outcome.value for t in trained if t.outcome is not None] == [1.0, 1.0]
        assert all(len(t.response_ids) <= 6 for t in trained), "no token of a rollout that nobody ends"
        assert api.value("rollmesh_agents_sessions_ended_total", how="given_up") == 2
        assert len(set(calls)) >= 4
        api.shutdown.set()


async def hung(api: Any) -> bool:
    return bool(api.value("rollmesh_agents_sessions_ended_total", how="idle"))


def test_what_is_no_coroutine_function_is_refused_with_the_field() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.function: .* must be an async function of \(client, row\)"):
        load_agent(f"{__name__}:not_async", {})
