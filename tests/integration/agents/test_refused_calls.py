"""Rewards of agents that cannot count."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from .agent_client import Agent, http_of
from .agent_mesh import AgentMesh


async def test_a_reward_that_cannot_count_is_refused_and_the_one_that_does_counts_once(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(schedule={"groups_per_batch": 1})
    async with mesh.api() as api, http_of(api) as http:
        agents = [await Agent.open(api, http) for _ in range(2)]
        for agent in agents:
            await agent.turn()

        async def post(session: str, reward: str) -> tuple[int, str | None]:
            body = {"content": f'{{"reward": {reward}}}', "headers": {"Content-Type": "application/json"}}
            answer = await http.post(f"/sessions/{session}/reward", **body)
            error = answer.json().get("error", {})
            return answer.status_code, error.get("param") if answer.status_code == 400 else error.get("code")

        first, second = (agent.id for agent in agents)
        for odd in ("NaN", "Infinity", "1e999", '"much"', "null"):
            assert await post(first, odd) == (400, "reward"), odd
        assert await post("my-session", "1.0") == (404, "session_not_found")
        for session, reward in ((first, "1.0"), (second, "0.0"), (first, "1.0")):
            assert await post(session, reward) == (200, None)
        assert await post(first, "0.5") == (422, "already_rewarded")
        batch = await mesh.batch(1)
        assert [t.shaped_reward for t in batch.groups[0].trajectories] == [1.0, 0.0]

        # Their group is trained: the sessions have ended, and keep their rewards.
        assert await post(first, "1.0") == (200, None)
        for agent in agents:
            with pytest.raises(openai.APIStatusError) as gone:
                await agent.turn()
            assert (gone.value.status_code, gone.value.code) == (410, "session_ended")
            await agent.aclose()
