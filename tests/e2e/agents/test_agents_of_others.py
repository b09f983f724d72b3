"""Agents of others train a run as their authors wrote them: the programs of docs/bring-your-agent.md, word for word."""

import asyncio
import math
import subprocess
from pathlib import Path

import pytest
import yaml

from rollmesh.runtime.addresses import free_port

from ...kit.agent_programs import page_programs
from ...kit.environments import python_of
from ...kit.openenv_server import openenv_server
from ...kit.verifiers_programs import document_script, verifiers_server
from ..conftest import ENDLESS
from .tool_run import ToolRun

STEPS = 3
ENVIRONMENT = "verifiers_calculator"
EXAMPLE = Path(__file__).parents[3] / "examples" / "agent.py"


def test_a_program_with_the_openai_client_trains_a_run_with_its_tool(start_tool_run) -> None:
    run = start_tool_run(trainer={"train_steps": STEPS})
    run.start_client("run_agent.py", "calculator:rollout")
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
@pytest.mark.parametrize("function", ["langchain_agent:rollout", "agents_sdk:rollout", "agents_sdk_responses:rollout"])
def test_a_framework_trains_a_run_with_its_tool(function: str, start_tool_run) -> None:
    python = python_of("frameworks")
    run = start_tool_run(trainer={"train_steps": STEPS})
    folder = run.line.run_file.parent
    block = (folder / "agents_sdk.py").read_text()
    responses = block.replace("OpenAIChatCompletionsModel", "OpenAIResponsesModel")
    (folder / "agents_sdk_responses.py").write_text(responses)
    run.start_client("run_agent.py", function, python=python)
    batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
def test_a_run_teaches_the_model_to_call_its_tool(start_tool_run) -> None:
    # With 16 answers a step and twice the rate the accuracy moves up and down by a third.
    settings = {"trainer": {"train_steps": ENDLESS, "learning_rate": 5e-4}, "generator": {"slots": 64}}
    run = start_tool_run(schedule={"groups_per_batch": 12, "pool_size": 72}, **settings)
    before, error_before = asyncio.run(run.accuracy(4))
    assert 0.3 <= before <= 0.6
    run.start_client("run_agent.py", "calculator:rollout")
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


@pytest.mark.long
def test_an_openenv_server_with_a_tool_trains_a_run(start_tool_run, tmp_path: Path) -> None:
    with openenv_server(tmp_path) as server:
        run = start_tool_run(f"{server.url}/calculator", trainer={"train_steps": STEPS})
        batches = run.ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
def test_an_environment_server_of_verifiers_trains_a_run(start_tool_run, tmp_path: Path, monkeypatch) -> None:
    token, address = "a-token-of-both", f"tcp://127.0.0.1:{free_port()}"
    monkeypatch.setenv("ROLLMESH_GATEWAY__TOKEN", token)
    written = subprocess.run(**document_script("tasks", ENVIRONMENT), stdout=subprocess.PIPE, check=True)
    (tmp_path / "rows.jsonl").write_bytes(written.stdout)
    rollout = yaml.safe_load(page_programs()["verifiers.yaml"])["rollout"]
    rollout["agent"]["function_options"]["address"] = address
    data = {"source": {"type": "jsonl", "path": str(tmp_path / "rows.jsonl"), "chat": True}}
    with verifiers_server(address, ENVIRONMENT, token, tmp_path / "server.log"):
        batches = start_tool_run(rollout=rollout, data=data, trainer={"train_steps": STEPS}).ended(STEPS)
    assert sum(t.reward for batch in batches for t in batch.trajectories) > 0


@pytest.mark.long
def test_the_agent_of_the_examples_trains_a_run(started) -> None:
    port = free_port()
    line, process = started(
        rollout={"program": "agent", "max_new_tokens": 256, "partial_save_tokens": 16},
        trainer={"train_steps": STEPS},
        agents={"port": port},
        gateway={"enabled": True},
        evaluation={"before_and_after": False},
    )
    run = ToolRun(line, process, f"http://127.0.0.1:{port}/v1")
    run.wait_until_it_answers()
    run.start_client(EXAMPLE)
    run.ended(STEPS)
