"""Rewards by turn through the real service: each answer's tokens are trained by the rewards from it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rollmesh.algorithms.advantages import dr_grpo
from rollmesh.trainer.learner.train_batch import build_train_batch
from rollmesh.types import Batch, Trajectory

from .agent_client import Agent, http_of, state
from .agent_mesh import AgentMesh

BY_TURN: dict[str, Any] = {
    "schedule": {"groups_per_batch": 1},
    "trainer": {"algorithm": {"credit": "turn", "advantage": "dr_grpo"}},
}


def returns(trajectory: Trajectory) -> list[tuple[int, float]]:
    assert trajectory.outcome is not None
    return [(turn.end, turn.value) for turn in trajectory.outcome.turns]


def token_advantages(batch: Batch) -> list[list[float]]:
    """Advantages of the sampled tokens of each trajectory, as a trainer of this run computes them."""
    flat = build_train_batch(batch, {0: 0}, dr_grpo, credit="turn")
    of_tokens = flat.advantages[flat.unit_index]
    return [of_tokens[flat.policy_mask & (flat.sequence_index == row)].tolist() for row in range(flat.trajectory_count)]


async def sampled(agent: Agent) -> int:
    """One call; the number of its tokens."""
    answer = await agent.turn()
    return len(answer.choices[0].model_extra["token_ids"])


async def test_each_answer_is_trained_by_the_rewards_from_it_on_across_a_drift(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(**BY_TURN)
    async with mesh.api() as api, http_of(api) as http:
        agent, other = [await Agent.open(api, http) for _ in range(2)]
        first, second = await sampled(agent), await sampled(agent)
        agent.messages[1] = {"role": "assistant", "content": "a summary of what I said"}
        third, whole = await sampled(agent), await sampled(other)
        seen = await state(http, agent.id)
        assert (seen["turn_count"], seen["drift_count"]) == (3, 1)
        for body, field, words in (
            ({"turns": [1.0]}, "turns", "1 rewards, but the session recorded 3 answers"),
            ({"turns": [1.0, 0.5, "nan"]}, "turns.2", "should be a finite number"),
            ({"turns": [1.0, 2e9, 0.0]}, "turns.1", "should be less than or equal to 1000000000"),
            ({"turns": [0.0, 9e8, 9e8]}, "turns", "rewards that sum up to 1.8e+09"),
            ({"turns": []}, "turns", "at least 1 item"),
            ({"turns": [0.0] * 3, "verify": True}, "reward", "exactly one of"),
        ):
            refused = await http.post(f"/sessions/{agent.id}/reward", json=body)
            assert refused.status_code == 400, refused.text
            assert refused.json()["error"]["param"] == field and words in refused.json()["error"]["message"]
        # Returns 1.5, 1, 2: the end gives 1 beside the turns.
        body = {"reward": 1.0, "turns": [0.5, -1.0, 1.0]}
        for _ in range(2):
            done = await http.post(f"/sessions/{agent.id}/reward", json=body)
            assert (done.status_code, done.json()["reward"]) == (200, 1.5), done.text
        for changed in ({"reward": 1.5}, {"reward": 1.0, "turns": [-1.0, 0.5, 1.0]}):
            conflict = await http.post(f"/sessions/{agent.id}/reward", json=changed)
            assert conflict.json()["error"]["code"] == "already_rewarded", "the sum is the same, the turns are not"
        # A reward alone is one of the end.
        assert (await http.post(f"/sessions/{other.id}/reward", json={"reward": -0.5})).status_code == 200
        batch = await mesh.batch(1)
        before, alone, after = batch.groups[0].trajectories
        assert returns(before) == [(first, 1.5), (first + second, 1.0)]
        assert returns(after) == [(third, 2.0)] and returns(alone) == [(whole, -0.5)]
        assert [t.shaped_reward for t in (before, alone, after)] == [1.5, -0.5, 1.5]
        # The mean of 1.5, 1, -0.5 and 2 is 1.
        assert token_advantages(batch) == [[0.5] * first + [0.0] * second, [-1.5] * whole, [1.0] * third]
        for each in (agent, other):
            await each.aclose()


async def test_a_run_without_credit_by_turn_refuses_rewards_by_turn(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        await agent.turn()
        refused = await http.post(f"/sessions/{agent.id}/reward", json={"turns": [1.0]})
        error = refused.json()["error"]
        assert (refused.status_code, error["param"], error["code"]) == (400, "turns", "no_rewards_by_turn")
        assert "trainer.algorithm.credit=trajectory" in error["message"]
        await agent.aclose()
