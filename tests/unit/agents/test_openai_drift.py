"""A context that differs from the record waits for room and for the end of a pause, each for its own time."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollmesh.agents import recorded_calls
from rollmesh.agents.agent_session import AgentGone
from rollmesh.agents.agents_metrics import OpenAiMetrics
from rollmesh.agents.context_match import Context
from rollmesh.agents.parsed_request import ParsedRequest
from rollmesh.agents.recorded_calls import RecordedCalls
from rollmesh.agents.session_manager import SessionManager
from rollmesh.runtime.metrics import Metrics
from rollmesh.store.queue_types import Fork, LeasedTrajectory
from rollmesh.types import ForkStatus, Int32Array, SamplingParams
from rollmesh.worker.active_trajectory import ActiveTrajectory

from .sessions_for_tests import TOKENS, held_trajectory, opened_session, rollout_of
from .tokenizers_for_tests import make_tokenizer

PARENT_ID, CHILD_ID = "e0-0.0", "e0-0.2"


@dataclass
class Queue:
    """A worker whose queue answers a request to fork with ``statuses``, each (seconds since the answer before)."""

    desk: SessionManager
    statuses: list[tuple[float, ForkStatus]]
    now: float = field(default_factory=time.monotonic)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    async def fork(self, active: ActiveTrajectory, nonce: str) -> Fork:
        seconds, status = self.statuses.pop(0)
        self.now += seconds
        if status is not ForkStatus.FORKED:
            return Fork(status=status)
        child = held_trajectory(0, 2)
        self.tasks.append(asyncio.create_task(self.desk.run(rollout_of(child))))
        leased = LeasedTrajectory(trajectory=child.trajectory, attempt=1, lease_new=True, first_lease_time=0.0)
        return Fork(status=status, leased=leased)


def request_of(ids: Int32Array) -> ParsedRequest:
    return ParsedRequest(
        context=Context(text="", token_ids=ids),
        field="prompt",
        whole_ids=lambda: ids,
        choices=1,
        stops=(),
        token_limit=None,
        params=SamplingParams(),
        pinned_version=None,
        seeded=False,
    )


@pytest.mark.parametrize(
    ("statuses", "restarted", "continued"),
    [
        (
            [(0.0, ForkStatus.POOL_FULL), (4.9, ForkStatus.POOL_FULL), (0.2, ForkStatus.POOL_FULL)],
            [PARENT_ID],
            PARENT_ID,
        ),
        (
            [
                (0.0, ForkStatus.POOL_FULL),
                (2.0, ForkStatus.PAUSED),
                (30.0, ForkStatus.PAUSED),
                (0.1, ForkStatus.POOL_FULL),
                (4.9, ForkStatus.FORKED),
            ],
            [],
            CHILD_ID,
        ),
    ],
    ids=["no room for 5 s", "no room before and after a pause"],
)
async def test_the_time_for_room_does_not_run_during_a_pause(
    statuses: list[tuple[float, ForkStatus]],
    restarted: list[str],
    continued: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    restarts: list[str] = []

    async def restart(active: ActiveTrajectory) -> None:
        restarts.append(active.trajectory_id)

    metrics = OpenAiMetrics(Metrics("gateway"))
    desk = SessionManager(metrics, 600.0)
    queue = Queue(desk, statuses)
    monkeypatch.setattr(recorded_calls, "time", SimpleNamespace(monotonic=lambda: queue.now))
    monkeypatch.setattr(recorded_calls, "_POLL_SECONDS", 0.0)
    limits = SimpleNamespace(budget=2 * TOKENS, calls=SimpleNamespace(saving=SimpleNamespace(chunk_token_count=8)))
    calls = RecordedCalls(make_tokenizer(tmp_path), desk, queue, metrics, limits)  # type: ignore[arg-type]
    held = held_trajectory(0)
    session, run = await opened_session(desk, rollout_of(held, restart=restart))
    first = await calls.start(session, request_of(held.context_ids()), is_retry=False)
    await first.aclose()
    differs = np.array([*session.prompt.token_ids, 9, 9], np.int32)
    answer = await calls.start(session, request_of(differs), is_retry=False)
    assert (answer.trajectory_id, restarts, queue.statuses) == (continued, restarted, [])
    await answer.aclose()
    desk.end(session, "given_up")
    for task in (run, *queue.tasks):
        with pytest.raises(AgentGone):
            await task
