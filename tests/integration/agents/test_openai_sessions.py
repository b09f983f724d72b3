"""Agents at work: their calls become trajectories, with the ids as sampled, and their rewards train them."""

import asyncio
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import openai
import pytest

from rollmesh.store.queue_types import Append, AppendResult, Fork, Score
from rollmesh.store.trajectories import TrajectoryQueue
from rollmesh.types import FinishReason, SegmentSource
from rollmesh.worker.worker import Worker

from .agent_client import Agent, above, http_of, state
from .agent_mesh import TASKS, AgentMesh


async def test_conversations_become_trajectories_with_the_ids_as_sampled(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(4)]
        assert [agent.told["messages"] for agent in agents] == [TASKS[0], TASKS[0], TASKS[1], TASKS[1]]
        assert [agent.told["task"] for agent in agents] == [{"answer": n} for n in "0011"]
        sampled: dict[str, list[list[int]]] = {}
        for agent in agents:
            answers = [await agent.turn(f"turn {n}", logprobs=True) for n in range(3)]
            sampled[agent.id] = [a.choices[0].model_extra["token_ids"] for a in answers]
            contexts = [a.model_extra["prompt_token_ids"] for a in answers]
            for before, ids, after in zip(contexts, sampled[agent.id], contexts[1:], strict=False):
                assert after[: len(before) + len(ids)] == before + ids, "no token of the context is written anew"
            for before, after in pairwise(answer.usage for answer in answers):
                assert after.prompt_tokens_details.cached_tokens >= before.total_tokens - 1
            assert answers[0].model_extra["rollmesh"]["session"] == agent.id
        assert api.value("rollmesh_agents_cached_tokens_total", recorded="yes") > 0
        # Calls without the header are nobody's.
        async with api.client() as stranger:
            await stranger.chat.completions.create(model=mesh.config.name, messages=TASKS[0], max_tokens=5)
        for number, agent in enumerate(agents):
            assert (await state(http, agent.id))["drift_count"] == 0
            done = await http.post(f"/sessions/{agent.id}/reward", json={"reward": float(number), "parts": {"x": 0.5}})
            assert done.status_code == 200, done.text
            assert done.json()["state"] == "rewarded"
        batch = await mesh.batch(1)
        by_session = {}
        for agent in agents:
            (part,) = (await state(http, agent.id))["trajectories"]
            by_session[part["id"]] = agent
        trajectories = {t.trajectory_id: t for g in batch.groups for t in g.trajectories}
        assert trajectories.keys() == by_session.keys()
        for name, trajectory in trajectories.items():
            agent = by_session[name]
            policy = [s for s in trajectory.segments if s.source is SegmentSource.POLICY]
            assert np.concatenate([s.token_ids for s in policy]).tolist() == [
                i for ids in sampled[agent.id] for i in ids
            ]
            assert all(s.behavior_logprobs is not None and (s.behavior_logprobs < 0).all() for s in policy)
            assert {s.policy_version for s in policy} == {0}
            text = mesh.tokenizer.decode(
                np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids]), special_tokens=True
            )
            assert mesh.tokenizer.chat_text(agent.messages[:-1]).startswith(text.removesuffix("<|im_end|>"))
            assert trajectory.finish_reason is FinishReason.ENVIRONMENT
            assert trajectory.outcome is not None and trajectory.outcome.parts["x"] == 0.5
            assert trajectory.shaped_reward == float(agents.index(agent))
        counts = await mesh.store.mesh.counts()
        assert counts.totals.get("forks_total", 0) == 0
        assert api.value("rollmesh_agents_sessions_ended_total", how="rewarded") == 4


async def test_a_later_call_of_a_session_writes_to_the_queue_once(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh()
    writes: list[int] = []
    append = TrajectoryQueue.append

    async def counted(queue: TrajectoryQueue, session: str, items: Sequence[Append]) -> list[AppendResult]:
        writes.append(sum(len(segment) for item in items for segment in item.segments))
        return await append(queue, session, items)

    monkeypatch.setattr(TrajectoryQueue, "append", counted)
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        await agent.turn()
        writes.clear()
        before = (await state(http, agent.id))["trajectories"][0]["tokens"]
        await agent.turn(max_tokens=8)
        after = (await state(http, agent.id))["trajectories"][0]["tokens"]
        assert writes == [after - before], "the message, the answer and the mark of the turn in one write"
        writes.clear()
        await agent.turn(max_tokens=300)
        assert len(writes) > 1 and max(writes) <= 64, "a crash costs what rollout.partial_save_tokens allows"


async def test_a_session_refuses_what_could_not_be_trained_on(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        with pytest.raises(openai.BadRequestError) as refused:
            await agent.turn(temperature=0.5)
        assert refused.value.param == "temperature"
        system = [{"role": "system", "content": "be brief"}, *agent.messages]
        with pytest.raises(openai.BadRequestError, match="rollout.agent.contexts=free"):
            await agent.client.chat.completions.create(model=mesh.config.name, messages=system)
        nothing = await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})
        assert (nothing.status_code, nothing.json()["error"]["code"]) == (400, "nothing_sampled")
        both = await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0, "verify": True})
        assert "exactly one of" in both.json()["error"]["message"]
        await agent.turn(temperature=1.0, top_p=1.0, n=1)
        too_long = [*agent.messages, {"role": "user", "content": "x" * 900}]
        with pytest.raises(openai.BadRequestError) as refused:
            await agent.client.chat.completions.create(model=mesh.config.name, messages=too_long)
        assert refused.value.code == "context_length_exceeded"
        await agent.turn()
        assert (await state(http, agent.id))["drift_count"] == 0, "what is refused leaves no trace"
        unknown = await http.get(f"/sessions/ses-{0:032x}")
        assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "session_not_found"


async def test_drift_opens_another_trajectory_and_both_are_rewarded(make_mesh: Callable[..., Any]) -> None:
    """The run truncates sampling: the tokens of the agent have kept sets, those that it sends have none."""
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1}, rollout={"top_p": 0.9, "top_k": 20})
    async with mesh.api() as api, http_of(api) as http:
        agent, other = [await Agent.open(api, http) for _ in range(2)]
        await agent.turn()
        first = await agent.turn()
        agent.messages[1] = {"role": "assistant", "content": "a summary of what I said"}
        drifted = await agent.turn()
        assert drifted.model_extra["rollmesh"]["trajectory"] != first.model_extra["rollmesh"]["trajectory"]
        goes_on = await agent.turn()
        assert goes_on.model_extra["rollmesh"]["trajectory"] == drifted.model_extra["rollmesh"]["trajectory"]
        seen = await state(http, agent.id)
        assert (seen["drift_count"], len(seen["trajectories"])) == (1, 2)
        assert api.value("rollmesh_agents_drift_total", outcome="forked") == 1
        await other.turn()
        for each, reward in ((agent, 1.0), (other, 0.0)):
            assert (await http.post(f"/sessions/{each.id}/reward", json={"reward": reward})).status_code == 200
        batch = await mesh.batch(1)
        trajectories = batch.groups[0].trajectories
        assert [t.shaped_reward for t in trajectories] == [1.0, 0.0, 1.0]
        child = trajectories[2]
        assert child.segments[0].source is SegmentSource.ENVIRONMENT
        for segment in (s for t in trajectories for s in t.segments):
            assert (segment.kept_sets is not None) == (segment.source is SegmentSource.POLICY)
            assert (
                segment.kept_sets is None or 1 <= segment.kept_sets.counts.min() <= segment.kept_sets.counts.max() <= 20
            )
        text = mesh.tokenizer.decode(child.response_ids, special_tokens=True)
        assert "a summary of what I said" in text


async def test_without_room_for_another_trajectory_a_drifted_one_begins_again(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        await agent.turn()
        for n in range(4):
            agent.messages[1] = {"role": "assistant", "content": f"summary {n}"}
            await agent.turn()
        seen = await state(http, agent.id)
        assert seen["drift_count"] == 4
        assert len(seen["trajectories"]) == 3, "a group of two has at most two more"
        assert api.value("rollmesh_agents_drift_total", outcome="forked") == 2
        assert api.value("rollmesh_agents_drift_total", outcome="restarted") == 2
        assert (await mesh.store.mesh.counts()).totals["restarts_total"] == 2
        assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})).status_code == 200


async def test_the_same_context_again_is_a_retry_or_a_wish_for_another_answer(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        options: dict[str, Any] = {"model": mesh.config.name, "messages": agent.messages, "max_tokens": 20}
        extra = {"extra_body": {"return_token_ids": True}}
        answer = await agent.client.chat.completions.create(**options, **extra)
        ids = answer.choices[0].model_extra["token_ids"]
        retry = {"extra_headers": {"x-stainless-retry-count": "1"}}
        again = await agent.client.chat.completions.create(**options, **extra, **retry)
        assert again.choices[0].model_extra["token_ids"] == ids
        assert (await state(http, agent.id))["drift_count"] == 0
        other = await agent.client.chat.completions.create(**options, **extra)
        assert other.choices[0].model_extra["token_ids"] != ids, "another trajectory has noise of its own"
        seen = await state(http, agent.id)
        assert seen["drift_count"] == 1

        async def one_left() -> bool:
            return len((await state(http, agent.id))["trajectories"]) == 1

        await mesh.until("the unwanted answer is given back", one_left)
        assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})).status_code == 200


async def test_equal_calls_at_once_get_an_answer_each(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1}, generator={"pace": [[1, 0.01]]})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        options: dict[str, Any] = {"model": mesh.config.name, "messages": agent.messages, "max_tokens": 20}
        client = agent.client.with_options(max_retries=10)
        calls = [client.chat.completions.create(**options, extra_body={"return_token_ids": True}) for _ in range(3)]
        answers = [tuple(answer.choices[0].model_extra["token_ids"]) for answer in await asyncio.gather(*calls)]
        assert len(set(answers)) == 3, "two were refused while the first was in progress, and retried by the client"
        assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})).status_code == 200
        other = await Agent.open(api, http)
        await other.turn()
        assert (await http.post(f"/sessions/{other.id}/reward", json={"reward": 0.0})).status_code == 200
        trained = (await mesh.batch(1)).groups[0].trajectories
        said = {tuple(t.response_ids.tolist()) for t in trained}
        assert said >= set(answers), "all that the agent was told"


async def test_a_call_that_is_cut_off_goes_on_with_the_tokens_it_has(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.01]]})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        options: dict[str, Any] = {"model": mesh.config.name, "messages": agent.messages, "max_tokens": 250}
        stream = await agent.client.chat.completions.create(**options, stream=True)
        told = ""
        async for event in stream:
            told += event.choices[0].delta.content or "" if event.choices else ""
            if len(told) > 10:
                break
        await stream.close()

        async def not_busy() -> bool:
            found = api.service.agents.session_manager.find(agent.id)  # type: ignore[union-attr]
            return not found.lock.locked()  # type: ignore[union-attr]

        await mesh.until("the call is over", not_busy)
        before = (await state(http, agent.id))["trajectories"][0]["tokens"]
        assert 0 < before < 250
        second = asyncio.create_task(agent.client.chat.completions.create(**options))
        await asyncio.sleep(0)
        whole = await second
        assert (whole.choices[0].message.content or "").startswith(told)
        assert (await state(http, agent.id))["drift_count"] == 0


async def test_an_agent_that_leaves_while_its_answer_is_saved_keeps_its_session(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh()
    append, saved, left = TrajectoryQueue.append, asyncio.Event(), asyncio.Event()

    async def late(queue: TrajectoryQueue, session: str, items: Sequence[Append]) -> list[AppendResult]:
        answer = await append(queue, session, items)
        saved.set()
        await left.wait()
        return answer

    monkeypatch.setattr(TrajectoryQueue, "append", late)
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        leaving = asyncio.create_task(agent.turn(max_tokens=4))
        await saved.wait()
        leaving.cancel()
        session = api.service.agent_parts.session_manager.find(agent.id)
        await mesh.until("the call has ended", lambda: not session.lock.locked())
        left.set()
        again = await agent.turn(max_tokens=4)
        assert again.choices[0].finish_reason == "length"
        await agent.turn()
        done = await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})
        assert done.status_code == 200 and done.json()["drift_count"] == 0, done.text


async def test_one_call_at_a_time_works_on_a_session(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(generator={"pace": [[1, 0.02]]})
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        call = asyncio.create_task(agent.turn(max_tokens=200))

        async def tokens() -> int:
            return (await state(http, agent.id))["trajectories"][0]["tokens"]

        await mesh.until("some tokens", lambda: above(tokens(), 4))
        body = {"model": mesh.config.name, "messages": agent.messages}
        second = await http.post("/chat/completions", json=body, headers={"X-Rollmesh-Session": agent.id})
        reward = await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})
        assert not call.done()
        for refused in (second, reward):
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy"), refused.text
            assert int(refused.headers["retry-after"]) >= 1
        await call
        await agent.turn(max_tokens=2)
        assert (await state(http, agent.id))["drift_count"] == 0
        assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": 1.0})).status_code == 200


async def test_a_session_whose_reward_is_being_scored_cannot_be_given_up(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    scoring, may_score, score = asyncio.Event(), asyncio.Event(), TrajectoryQueue.score

    async def scores_later(queue: TrajectoryQueue, session: str, items: Sequence[Score]) -> list[AppendResult]:
        scoring.set()
        await may_score.wait()
        return await score(queue, session, items)

    monkeypatch.setattr(TrajectoryQueue, "score", scores_later)
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        for agent in agents:
            await agent.turn()
        post = asyncio.create_task(http.post(f"/sessions/{agents[0].id}/reward", json={"reward": 1.0}))
        await scoring.wait()
        refused = await http.delete(f"/sessions/{agents[0].id}")
        assert refused.status_code == 409, refused.text
        assert refused.json()["error"]["code"] == "reward_stored"
        may_score.set()
        assert (await post).status_code == 200
        seen = await state(http, agents[0].id)
        assert (seen["state"], seen["reward"]) == ("rewarded", 1.0)
        assert (await http.post(f"/sessions/{agents[1].id}/reward", json={"reward": 0.0})).status_code == 200
        for agent in agents:
            assert (await http.delete(f"/sessions/{agent.id}")).status_code == 204, "the session has ended already"
    batch = await mesh.batch(1)
    assert [t.shaped_reward for t in batch.groups[0].trajectories] == [1.0, 0.0]


async def test_a_session_that_is_given_up_while_it_opens_another_trajectory_keeps_none(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    forking, may_fork, fork = asyncio.Event(), asyncio.Event(), Worker.fork

    async def forks_later(*arguments: Any) -> Fork:
        forking.set()
        await may_fork.wait()
        return await fork(*arguments)

    monkeypatch.setattr(Worker, "fork", forks_later)
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        await agent.turn()
        agent.messages[1] = {"role": "assistant", "content": "a summary"}
        turn = asyncio.create_task(agent.turn())
        await forking.wait()
        assert (await http.delete(f"/sessions/{agent.id}")).status_code == 204
        may_fork.set()
        with pytest.raises(openai.APIStatusError) as refused:
            await turn
        assert refused.value.code == "session_ended"

        async def all_back() -> bool:
            return (await mesh.store.mesh.counts()).trajectories["leased"] == 0

        await mesh.until("its trajectories are given back", all_back)
        for _ in range(2):
            await (await Agent.open(api, http)).turn()


async def test_stop_strings_completions_and_verified_rewards(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        for agent in agents:
            ids = list(agent.told["prompt_token_ids"])
            for _ in range(3):
                answer = await agent.client.completions.create(
                    model=mesh.config.name, prompt=ids, max_tokens=30, stop=["e", "a"],
                    extra_body={"return_token_ids": True},
                )  # fmt: skip
                own = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
                assert not {"e", "a"} & set(answer.choices[0].text)
                ids += [*own, *mesh.tokenizer.encode(" Observation: 42\n").tolist()]
            seen = await state(http, agent.id)
            assert seen["drift_count"] == 0
            done = await http.post(f"/sessions/{agent.id}/reward", json={"error": "the tool broke"})
            assert done.status_code == 200, done.text
        counts = await mesh.store.mesh.counts()
        assert counts.totals["unscorable_total"] == 2


async def test_free_contexts_let_the_agent_write_its_own_prompt(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(rollout={"agent": {"contexts": "free"}}, schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        for number in range(2):
            agent = await Agent.open(api, http)
            assert agent.told["prompt"] == mesh.tokenizer.chat_text(TASKS[0])
            assert len(agent.told["prompt_token_ids"]) == 1
            agent.messages.insert(0, {"role": "system", "content": f"be brief, agent {number}"})
            for _ in range(2):
                await agent.turn()
            assert (await http.post(f"/sessions/{agent.id}/reward", json={"reward": number})).status_code == 200
    for number, trajectory in enumerate((await mesh.batch(1)).groups[0].trajectories):
        ids = np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids])
        assert f"be brief, agent {number}" in mesh.tokenizer.decode(ids, special_tokens=True)
        assert trajectory.segments[0].source is SegmentSource.ENVIRONMENT
