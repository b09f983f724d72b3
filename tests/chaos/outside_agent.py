"""Agent of the rounds whose rollouts come from outside of the mesh: the page's program with its calculator tool."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollmesh.runtime.addresses import free_port

from ..kit.agent_programs import write_page_run
from ..kit.tool_task import write_tool_model

TOKEN = "token-of-the-rounds"


@dataclass(frozen=True, slots=True)
class OutsideAgent:
    """Run file of a round with an outside agent, and the program that takes its tasks."""

    folder: Path
    """Folder of the programs, the tasks and the model."""

    def run_file(self) -> dict[str, Any]:
        """Train the model, write the programs, and return the run file: the page's, at a free port."""
        self.folder.mkdir(parents=True)
        data = write_page_run(self.folder, write_tool_model(self.folder / "model"))
        return {**data, "agents": {**data["agents"], "port": free_port()}, "gateway": {"token": TOKEN}}

    @contextmanager
    def working(self, port: int) -> Iterator[None]:
        """Run the agent during the block, and kill it at the end: it tries again before it believes in an end."""
        variables = {"ROLLMESH_URL": f"http://127.0.0.1:{port}/v1", "ROLLMESH_TOKEN": TOKEN, "NO_PROXY": "*"}
        with self._log.open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "outside.py", "calculator:rollout"],
                cwd=self.folder,
                env={**os.environ, **variables},
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
        """What the agent reported: an error that is no typed end of a session ends it with a traceback."""
        told = self._log.read_text() if self._log.exists() else ""
        return (f"the agent: {told[-2000:]}",) if told else ()

    @property
    def _log(self) -> Path:
        return self.folder / "agent.log"
