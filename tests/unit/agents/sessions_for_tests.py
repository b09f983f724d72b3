"""Sessions of a manager whose worker the test plays."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from rollmesh.agents.agent_session import AgentSession
from rollmesh.agents.session_manager import SessionManager
from rollmesh.types import Prompt, SamplingParams, Segment, Trajectory
from rollmesh.worker.active_trajectory import ActiveTrajectory
from rollmesh.worker.program import RolloutContext

from ...kit.records import policy_tokens

TOKENS = 8192


def held_trajectory(number: int, member: int = 0) -> ActiveTrajectory:
    prompt = Prompt(
        prompt_id="p", verifier="exact", token_ids=np.arange(16, dtype=np.int32), metadata={"answer": str(number)}
    )
    return ActiveTrajectory(
        Trajectory(
            trajectory_id=f"e0-{number}.{member}",
            group_id=f"e0-{number}",
            prompt=prompt,
            member_index=member,
            birth_version=0,
        )
    )


def sampled(version: int) -> Segment:
    return policy_tokens(range(TOKENS), version)


async def done(*_: Any) -> None:
    return


def rollout_of(
    held: ActiveTrajectory,
    keep_snapshot: Callable[..., Awaitable[None]] = done,
    restart: Callable[..., Awaitable[None]] = done,
) -> RolloutContext:
    """``keep_snapshot`` is called for every mark, with unsaved tokens before it or without."""
    return RolloutContext(
        active=held,
        caller=None,  # type: ignore[arg-type]  # no call is made here
        params=SamplingParams(temperature=1.0, seed=0, stop_token_ids=(1,)),
        budget=2 * TOKENS,
        save=keep_snapshot,
        report_first_token=done,
        restart=restart,
        keep_snapshot=keep_snapshot,
    )


async def opened_session(desk: SessionManager, rollout: RolloutContext) -> tuple[AgentSession, asyncio.Task[Any]]:
    """Open a session and sample into it; returns it and the worker's task."""
    opened = asyncio.create_task(desk.waiting.session(60.0))
    while not desk.waiting.wanted():
        await asyncio.sleep(0)
    run = asyncio.create_task(desk.run(rollout))
    session = await opened
    rollout.active.add(sampled(3))
    return session, run
