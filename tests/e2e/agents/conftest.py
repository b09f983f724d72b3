"""The model of the tool task, once a session, and runs of it."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.addresses import free_port
from rollmesh.store import EmbeddedServer

from ...kit.agent_programs import write_environment_run, write_page_run
from ...kit.tool_task import write_tool_model
from ..conftest import CommandLine, end, merged
from .tool_run import GROUP_SIZE, ToolRun

SMALL = {
    "schedule": {
        "preset": "copris",
        "groups_per_batch": 4,
        "group_size": GROUP_SIZE,
        "pool_size": 24,
        "max_staleness": 4,
    },
    "generator": {"replicas": 1, "slots": 32, "max_context_tokens": 900},
    "trainer": {"train_steps": 4, "learning_rate": 1e-3},
    "rollout": {"partial_save_tokens": 16},
    "gateway": {"enabled": True, "port": 0},
    "checkpoints": {"keep_last": 64},
    "evaluation": {"before_and_after": False},
}


@pytest.fixture(scope="session")
def tool_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tool_model(tmp_path_factory.mktemp("tool-model"))


@pytest.fixture
def start_tool_run(tool_model: Path, tmp_path: Path) -> Iterator[Callable[..., ToolRun]]:
    """``start_tool_run(trainer={...})``: start the page's run with the small model and these sections changed.

    ``environment`` is the URL of an OpenEnv server that answers the turns, in place of an agent.
    """
    runs: list[ToolRun] = []

    def start(environment: str = "", **sections: Any) -> ToolRun:
        port, folder = free_port(), tmp_path / "run"
        if environment:
            data = write_environment_run(tmp_path, tool_model, environment)
        else:
            data = write_page_run(tmp_path, tool_model)
        for changes in (SMALL, {"name": "tools", "folder": str(folder), "agents": {"port": port}}, sections):
            data = merged(data, changes)
        file = tmp_path / "small.yaml"
        file.write_text(yaml.safe_dump(data))
        line = CommandLine(run_file=file, folder=folder)
        runs.append(ToolRun(line, line.start("up", str(file)), f"http://127.0.0.1:{port}/v1"))
        if not environment:
            runs[-1].wait_until_it_answers()
        return runs[-1]

    yield start
    for run in runs:
        for process in (run.process, *run.clients):
            if process.poll() is None:
                process.terminate()
                end(process)
    EmbeddedServer(RunFolder(tmp_path / "run").redis).kill()
