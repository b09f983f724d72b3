"""Process outside of the mesh that takes part in the rollouts of a round: an agent, or the server of an environment."""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rollmesh.runtime.addresses import free_port

from ..kit.agent_programs import write_environment_run, write_page_run
from ..kit.openenv_server import OpenEnvServer
from ..kit.tool_task import write_tool_model
from .faults import Outside

TOKEN = "token-of-the-rounds"


class OutsideProcess:
    """Agent or environment of docs/bring-your-agent.md, with its model, tasks and run file in ``folder``."""

    def __init__(self, kind: Outside, folder: Path) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self._log = folder / "agent.log"
        self.server = OpenEnvServer(folder) if kind is Outside.ENVIRONMENT else None

    def run_file(self) -> dict[str, Any]:
        """Train the model, write programs and tasks, and return the page's run file."""
        model = write_tool_model(self._folder / "model")
        if self.server is not None:
            return write_environment_run(self._folder, model, f"{self.server.url}/calculator")
        data = write_page_run(self._folder, model)
        return {**data, "agents": {**data["agents"], "port": free_port()}, "gateway": {"token": TOKEN}}

    @contextmanager
    def working(self, data: Mapping[str, Any]) -> Iterator[None]:
        """Let the process work on a run during the block, and kill it at the end."""
        if self.server is not None:
            try:
                yield
            finally:
                self.server.kill()
            return
        variables = {"ROLLMESH_URL": f"http://127.0.0.1:{data['agents']['port']}/v1", "ROLLMESH_TOKEN": TOKEN}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "run_agent.py", "calculator:rollout"],
                cwd=self._folder,
                env={**os.environ, **variables, "NO_PROXY": "*"},
                stdout=log,
                stderr=log,
            )
        try:
            yield
        finally:
            process.kill()
            process.wait()

    @property
    def problems(self) -> tuple[str, ...]:
        """What the agent printed: it goes on after an error that says that a session has ended, and after no other."""
        told = self._log.read_text() if self._log.exists() else ""
        return (f"the agent: {told[-2000:]}",) if told else ()
