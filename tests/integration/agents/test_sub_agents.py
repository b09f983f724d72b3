"""Sub-agents share the reward that their parent gets once; rewards by turn train each answer's tokens from it on."""

from collections.abc import Callable
from typing import Any

import httpx
import pytest

from rollmesh.agents.agent_session import SessionTrajectory
from rollmesh.algorithms.advantages import dr_grpo
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.scheduling import run_limits
from rollmesh.trainer.learner.train_batch import build_train_batch
from rollmesh.types import Batch, Trajectory
from rollmesh.worker.program import RolloutContext

from ...kit.run_files import run_config
from .agent_client import Agent, http_of, state
from .agent_mesh import AgentMesh, Api

SHARED: dict[str, Any] = {
    "schedule": {"groups_per_batch": 1},
    "trainer": {"algorithm": {"credit": "shared", "advantage": "dr_grpo"}},
}


async def sub_agent(api: Api, http: httpx.AsyncClient, parent: str) -> Agent:
    told = await http.post("/sessions", json={"parent": parent})
    assert told.status_code == 201, told.text
    return Agent(api, told.json())


async def test_sub_agents_are_trained_by_the_reward_of_their_parent_which_counts_once(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh(**SHARED)
    # A team is in one replica, whichever is asked.
    async with mesh.api() as first, mesh.api(1) as replica, http_of(first) as http, http_of(replica) as there:
        parent, alone = [await Agent.open(first, http) for _ in range(2)]
        subs = [await sub_agent(replica, there, parent.id), await sub_agent(first, http, parent.id)]
        assert len({parent.id, alone.id, *(sub.id for sub in subs)}) == 4
        assert {sub.told["parent"] for sub in subs} == {parent.id} and parent.told["parent"] is None
        assert {sub.told["group_id"] for sub in subs} == {parent.told["group_id"]}
        for agent in (parent, alone, *subs):
            await agent.turn()
        full = await there.post("/sessions", json={"parent": subs[0].id})
        assert (full.status_code, full.json()["error"]["code"]) == (429, "no_room"), "a group of two has two more"
        refused = await http.post(f"/sessions/{subs[1].id}/reward", json={"reward": 1.0})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "shared_reward")
        assert parent.id in refused.json()["error"]["message"]
    # The next service takes the sessions over with their team.
    async with mesh.api(index=2) as second, http_of(second) as http:
        for agent in (parent, *subs, alone):
            moved = Agent(second, agent.told, max_retries=10)
            moved.messages = agent.messages
            await moved.turn()
        for _ in range(2):
            done = await http.post(f"/sessions/{parent.id}/reward", json={"reward": 1.0})
            assert done.status_code == 200, done.text
        for agent in (parent, *subs):
            assert ((await state(http, agent.id))["state"], (await state(http, agent.id))["reward"]) == (
                "rewarded",
                1.0,
            )
        assert (await http.post(f"/sessions/{alone.id}/reward", json={"reward": 0.0})).status_code == 200
    batch = await mesh.batch(1)
    trajectories = batch.groups[0].trajectories
    assert [t.outcome.shared_by for t in trajectories if t.outcome] == [parent.id, alone.id, parent.id, parent.id]
    assert [t.shaped_reward for t in trajectories] == [1.0, 0.0, 1.0, 1.0]
    flat = build_train_batch(batch, {0: 0}, dr_grpo, credit="shared")
    # The mean of the two sessions is 0.5; of the four trajectories it would be 0.75.
    assert flat.advantages[flat.unit_index[flat.starts[:-1]]].tolist() == [0.5, -0.5, 0.5, 0.5]
    counts = await mesh.store.mesh.counts()
    assert counts.totals.get("restarts_total", 0) == 0 and counts.totals["scored_total"] == 4


async def test_a_team_is_given_up_together_and_only_its_parent_begins_it(make_mesh: Callable[..., Any]) -> None:
    mesh: AgentMesh = await make_mesh(**SHARED)
    async with mesh.api() as api, http_of(api) as http:
        parent = await Agent.open(api, http)
        sub = await sub_agent(api, http, parent.id)
        await sub.turn()
        nothing = await http.post(f"/sessions/{parent.id}/reward", json={"reward": 1.0})
        assert nothing.json()["error"]["code"] == "nothing_sampled", "a parent has an answer of its own"
        assert (await http.delete(f"/sessions/{parent.id}")).status_code == 204
        assert (await state(http, sub.id))["state"] == "given_up"
        late = await http.post("/sessions", json={"parent": parent.id})
        assert (late.status_code, late.json()["error"]["code"]) == (410, "session_ended")


async def test_a_reward_of_a_team_that_a_crash_cuts_short_is_posted_again_to_the_parent(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh(**SHARED)
    save, saved = SessionTrajectory.save_mark, list[str]()

    async def only_the_first(self: SessionTrajectory, rollout: RolloutContext, **changes: Any) -> None:
        if changes.get("outcome") and saved:
            raise StoreUnavailable("the queue died between two members")
        await save(self, rollout, **changes)
        if changes.get("outcome"):
            saved.append(self.mark.session_id)

    async def one_is_scored() -> bool:
        return (await mesh.store.mesh.counts()).totals.get("scored_total") == 1

    async with mesh.api() as api, http_of(api) as http:
        parent, alone = [await Agent.open(api, http) for _ in range(2)]
        sub = await sub_agent(api, http, parent.id)
        for agent in (parent, sub, alone):
            await agent.turn()
        assert (await http.post(f"/sessions/{alone.id}/reward", json={"reward": 0.0})).status_code == 200
        await mesh.until("the reward of the other agent is recorded", one_is_scored)
        monkeypatch.setattr(SessionTrajectory, "save_mark", only_the_first)
        cut_short = await http.post(f"/sessions/{parent.id}/reward", json={"reward": 1.0})
        assert (cut_short.status_code, saved) == (503, [sub.id])
        for agent in (parent, sub):
            refused = await http.delete(f"/sessions/{agent.id}")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "reward_stored")
        monkeypatch.setattr(SessionTrajectory, "save_mark", save)
    async with mesh.api(index=1) as second, http_of(second) as http:

        async def post(value: float) -> int:
            return (await http.post(f"/sessions/{parent.id}/reward", json={"reward": value})).status_code

        async def is_refused() -> bool:
            if (status := await post(0.25)) == 200:
                raise AssertionError("the rest of the team was trained by another reward")
            return status == 422

        await mesh.until("the parent is taken over, and has its reward", is_refused)
        assert await post(1.0) == 200
    trajectories = (await mesh.batch(1)).groups[0].trajectories
    assert [t.outcome.shared_by for t in trajectories if t.outcome] == [parent.id, alone.id, parent.id]
    assert [t.shaped_reward for t in trajectories] == [1.0, 0.0, 1.0]
    totals = (await mesh.store.mesh.counts()).totals
    assert totals["scored_total"] == 3 and totals.get("restarts_total", 0) == 0


async def test_a_sub_agent_that_could_not_be_opened_leaves_no_session(
    make_mesh: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    mesh: AgentMesh = await make_mesh(**SHARED)

    async def dies(*_: Any) -> None:
        raise StoreUnavailable("the queue died before the mark of the sub-agent was saved")

    async def one_is_leased() -> bool:
        return (await mesh.store.mesh.counts()).trajectories["leased"] == 1

    async with mesh.api() as api, http_of(api) as http:
        parent = await Agent.open(api, http)
        with monkeypatch.context() as broken:
            broken.setattr(SessionTrajectory, "save_mark", dies)
            told = await http.post("/sessions", json={"parent": parent.id})
            assert told.status_code == 503, told.text
        (left,) = (await http.get("/sessions")).json()["data"]
        assert left["id"] == parent.id
        await mesh.until("the trajectory of the sub-agent is given back", one_is_leased)


async def test_a_run_with_credit_by_trajectory_has_neither_sub_agents_nor_rewards_by_turn(
    make_mesh: Callable[..., Any],
) -> None:
    mesh: AgentMesh = await make_mesh()
    async with mesh.api() as api, http_of(api) as http:
        agent = await Agent.open(api, http)
        await agent.turn()
        for path, field, value, code in (
            ("/sessions", "parent", agent.id, "no_shared_rewards"),
            (f"/sessions/{agent.id}/reward", "turns", [1.0], "no_rewards_by_turn"),
        ):
            refused = await http.post(path, json={field: value})
            error = refused.json()["error"]
            assert (refused.status_code, error["param"], error["code"]) == (400, field, code)
        assert "trainer.algorithm.credit=trajectory" in error["message"]


def test_most_members_is_the_room_for_sub_agents() -> None:
    fields = "rollout.program=agent schedule.group_size=2 curriculum.most_members=12"
    assert run_limits(run_config(f"{fields} trainer.algorithm.credit=shared")).most_members == 12
    with pytest.raises(ConfigError, match="most_members=12 with curriculum.planner=single would have no effect"):
        run_limits(run_config(fields))


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
