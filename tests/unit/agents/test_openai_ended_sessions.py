"""A session in use does not end as idle; an ended one keeps its ids, counts and marks, and releases its tokens."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from rollmesh.agents import posted_rewards
from rollmesh.agents.agent_session import AgentSession, EndedSession
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.openai_errors import OpenAiError
from rollmesh.agents.posted_rewards import Rewards, check_repeated
from rollmesh.agents.request_schema import RewardRequest
from rollmesh.agents.session_manager import SessionManager
from rollmesh.agents.session_trajectory import AgentGone
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import ReleaseReason
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


async def done(*_: Any) -> None:
    return


def rollout_of(held: ActiveTrajectory, keep_snapshot: Callable[..., Awaitable[None]] = done) -> RolloutContext:
    return RolloutContext(
        active=held,
        caller=None,  # type: ignore[arg-type]  # no call is made here
        params=SamplingParams(temperature=1.0, seed=0, stop_token_ids=(1,)),
        budget=2 * TOKENS,
        save=done,
        report_first_token=done,
        restart=done,
        keep_snapshot=keep_snapshot,
    )


async def opened_session(desk: SessionManager, rollout: RolloutContext) -> tuple[AgentSession, asyncio.Task[Any]]:
    """Open a session and sample into it; returns it and the worker's task."""
    opened = asyncio.create_task(desk.open(60.0))
    while not desk.wanted():
        await asyncio.sleep(0)
    run = asyncio.create_task(desk.run(rollout))
    session = await opened
    assert session is not None
    rollout.active.add(sampled(3))
    return session, run


async def ended_session(desk: SessionManager, number: int, how: str) -> tuple[str, weakref.ref[ActiveTrajectory]]:
    """Open a session, sample into it, end it; returns its id and a weak reference to its tokens."""
    held = held_trajectory(number)
    session, run = await opened_session(desk, rollout_of(held))
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


async def silent_for_long(session: AgentSession) -> None:
    """Move the last use of a session past its idle timeout, and let its trajectories see it."""
    session.last_use -= 2 * session.idle_seconds
    for trajectory in session.trajectories:
        trajectory.notify()
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_session_is_not_idle_while_a_call_holds_it() -> None:
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), 600.0)
    session, run = await opened_session(desk, rollout_of(held_trajectory(0)))
    async with session.lock:  # as a call of another trajectory holds it, or one that waits for a lease
        await silent_for_long(session)
        assert not run.done() and not session.ended
        assert 599.0 < session.describe("run", with_task=False)["idle_seconds_left"] <= 600.0
        session.touch()
    await asyncio.sleep(0)
    assert session.deadline > time.monotonic() + 590.0, "the idle time counts from the end of the call"
    await silent_for_long(session)
    with pytest.raises(AgentGone, match="idle"):
        await run
    assert session.ended == "idle"


async def test_the_idle_time_counts_from_the_end_of_a_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posted_rewards, "_LEASE_WAIT_SECONDS", 0.1)
    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), 600.0)
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held))
    held.park(ReleaseReason.PAUSED)
    post = asyncio.create_task(Rewards(desk, 2 * TOKENS).post(session, RewardRequest(reward=1.0)))
    while not session.lock.locked():
        await asyncio.sleep(0)
    await silent_for_long(session)
    with pytest.raises(OpenAiError, match="no lease"):
        await post
    await asyncio.sleep(0)
    assert not run.done() and session.deadline > time.monotonic() + 590.0
    desk.end(session, "given_up")
    with pytest.raises(AgentGone):
        await run


async def test_a_session_given_up_before_its_reward_is_stored_is_not_trained() -> None:
    saving, saved = asyncio.Event(), asyncio.Event()

    async def keep_snapshot(*_: Any) -> None:
        if held.token_count:  # the mark with the reward
            saving.set()
            await saved.wait()

    desk = SessionManager(OpenAiMetrics(Metrics("gateway")), 600.0)
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held, keep_snapshot))
    post = asyncio.create_task(Rewards(desk, 2 * TOKENS).post(session, RewardRequest(reward=1.0)))
    await saving.wait()
    desk.end(session, "given_up")
    saved.set()
    with pytest.raises(AgentGone, match="given_up"):
        await run
    held.close()
    with pytest.raises(OpenAiError) as gone:
        await post
    assert gone.value.code == "session_ended"
