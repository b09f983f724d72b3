"""Agents of others train a run as their authors wrote them: the programs of docs/bring-your-agent.md, word for word."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest

from ...kit.environments import NotInstalled, python_of
from ..conftest import ENDLESS

STEPS = 3


def test_a_program_with_the_openai_client_trains_a_run_with_its_tool(start_tool_run) -> None:
    run = start_tool_run(trainer={"train_steps": STEPS})
    run.start_client("outside.py", "calculator:rollout")
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
@pytest.mark.parametrize("function", ["langchain_agent:rollout", "agents_sdk:rollout"])
def test_a_framework_trains_a_run_with_its_tool(function: str, start_tool_run) -> None:
    try:
        python = python_of("frameworks")
    except NotInstalled as missing:
        pytest.skip(str(missing))
    run = start_tool_run(trainer={"train_steps": STEPS})
    run.start_client("outside.py", function, python=python)
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
def test_synchronous_and_streaming_clients_train_a_run(start_tool_run) -> None:
    run = start_tool_run(trainer={"train_steps": STEPS})
    run.start_client(Path(__file__).with_name("sync_agent.py"))
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
def test_a_run_teaches_the_model_to_call_its_tool(start_tool_run) -> None:
    run = start_tool_run(trainer={"train_steps": ENDLESS})
    before, error_before = asyncio.run(run.accuracy(4))
    assert 0.3 <= before <= 0.6
    run.start_client("outside.py", "calculator:rollout")
    run.line.trains(run.process, 16)
    after, error_after = asyncio.run(run.accuracy(4))
    print(f"accuracy {before:.3f} +- {error_before:.3f} before, {after:.3f} +- {error_after:.3f} after")
    assert after - before > 2 * math.hypot(error_before, error_after)
    run.stopped()


@pytest.mark.long
def test_the_service_runs_the_function_of_the_page(start_tool_run) -> None:
    run = start_tool_run(trainer={"train_steps": STEPS}, rollout={"agent": {"function": "calculator:rollout"}})
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0
