"""An ended session keeps its ids, counts and marks; its tokens and its task are released."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest

from rollmesh.agents.agent_session import EndedSession
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.agents.posted_rewards import check_repeated
from rollmesh.agents.request_schema import RewardRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.agents.session_trajectory import AgentGone
from rollmesh.runtime.metrics import Metrics
from rollmesh.types import Prompt, SamplingParams, Segment, SegmentSource, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.program import RolloutContext

TOKENS = 8192


def held_trajectory(number: int) -> ActiveTrajectory:
    prompt = Prompt(
        prompt_id="p", verifier="exact", token_ids=np.arange(16, dtype=np.int32), metadata={"answer": str(number)}
    )
    return ActiveTrajectory(
        Trajectory(
            trajectory_id=f"e0-{number}.0",
            group_id=f"e0-{number}",
            prompt=prompt,
            member_index=0,
            birth_version=0,
        )
    )


def sampled(version: int) -> Segment:
    return Segment(
        token_ids=np.arange(TOKENS, dtype=np.int32),
        behavior_logprobs=np.full(TOKENS, -1.0, np.float32),
        policy_version=version,
        kv_min_version=version,
        source=SegmentSource.POLICY,
        temperature=1.0,
    )


def rollout_of(held: ActiveTrajectory) -> RolloutContext:
    async def done(*_: Any) -> None:
        return

    return RolloutContext(
        active=held,
        caller=None,  # type: ignore[arg-type]  # no call is made here
        params=SamplingParams(temperature=1.0, seed=0, stop_token_ids=(1,)),
        budget=2 * TOKENS,
        save=done,
        report_first_token=done,
        restart=done,
        keep_snapshot=done,
    )


async def ended_session(desk: SessionManager, number: int, how: str) -> tuple[str, weakref.ref[ActiveTrajectory]]:
    """Open a session, sample into it, end it; returns its id and a weak reference to its tokens."""
    held = held_trajectory(number)
    opened = asyncio.create_task(desk.open(60.0))
    while not desk.wanted():
        await asyncio.sleep(0)
    run = asyncio.create_task(desk.run(rollout_of(held)))
    session = await opened
    assert session is not None
    held.add(sampled(3))
    desk.end(session, how)
    with pytest.raises(AgentGone):
        await run
    return session.session_id, weakref.ref(held)


@pytest.mark.parametrize("how", ["given_up", "idle", "lost"])
async def test_an_ended_session_releases_its_tokens_and_keeps_ids_and_counts(how: str) -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), 600.0)
    sessions = [await ended_session(desk, number, how) for number in range(5)]
    await asyncio.sleep(0)  # the loop lets go of the last task and its exception
    gc.collect()
    for number, (session_id, tokens) in enumerate(sessions):
        assert tokens() is None, "the tokens of an ended session are still in memory"
        found = desk.find(session_id)
        assert found is not None and found.ended == how
        shown = found.describe("run")  # type: ignore[call-arg]
        assert shown["trajectories"] == [{"id": f"e0-{number}.0", "tokens": TOKENS, "policy_versions": [3]}]
        assert (shown["model"], shown["state"], shown["idle_seconds_left"]) == ("run", how, 0.0)


async def test_a_reward_for_a_session_that_ended_without_one_is_refused() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), 600.0)
    session_id, _ = await ended_session(desk, 0, "idle")
    found = desk.find(session_id)
    assert isinstance(found, EndedSession)
    with pytest.raises(OpenAiError, match="idle_timeout_seconds"):
        check_repeated(found, RewardRequest(reward=1.0))
