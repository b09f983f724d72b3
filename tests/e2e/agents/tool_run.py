"""A run of agents with a calculator tool, and the programs of the page "bring your agent" as its clients."""

import asyncio
import math
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from openai import AsyncOpenAI

from ...chaos.judge import judge
from ...chaos.judge.files import BatchFile, read_run
from ...kit.agent_programs import page_programs
from ...kit.tool_task import FIXED_ROWS, question, tool_tasks
from ..conftest import WAIT_SECONDS, CommandLine, assert_rescored, interrupted, until

GROUP_SIZE = 4


@dataclass
class ToolRun:
    """A run that is up, and its clients."""

    line: CommandLine
    process: subprocess.Popen[str]
    url: str
    clients: list[subprocess.Popen[str]] = field(default_factory=list)

    @property
    def token(self) -> str:
        return (self.line.folder / "gateway-token").read_text().strip()

    def wait_until_it_answers(self) -> None:
        def answers() -> bool:
            try:
                return httpx.get(f"{self.url}/openapi.json", trust_env=False).status_code == 200
            except httpx.HTTPError:
                return False

        until(answers, "the agents service", self.process)

    def start_client(self, *program: str | Path, python: Path | str = sys.executable) -> None:
        """Start a client in a process of its own, in the folder of the page's programs."""
        folder = self.line.run_file.parent
        environment = {**os.environ, "ROLLMESH_URL": self.url, "ROLLMESH_TOKEN": self.token, "NO_PROXY": "*"}
        process = subprocess.Popen(
            [python, *program],
            cwd=folder,
            env={**environment, "PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.clients.append(process)

    async def accuracy(self, repeats: int) -> tuple[float, float]:
        """Share of right answers of the page's agent on the fixed rows outside of any session, and its error."""
        names: dict[str, Any] = {}
        exec(page_programs()["calculator.py"], names)
        at_once = asyncio.Semaphore(16)

        async def attempt(client: AsyncOpenAI, expression: str, value: str) -> float:
            async with at_once:
                row = {"model": "tools", "messages": [question(expression)], "task": {"answer": value}}
                result: float = await names["rollout"](client, row)
                return result

        async with AsyncOpenAI(base_url=self.url, api_key=self.token, max_retries=20) as client:
            tasks = tool_tasks()[-FIXED_ROWS:] * repeats
            found = np.array(await asyncio.gather(*(attempt(client, *task) for task in tasks)))
        by_row = found.reshape(repeats, FIXED_ROWS).mean(0)
        return float(by_row.mean()), float(by_row.std(ddof=1) / math.sqrt(FIXED_ROWS))

    def ended(self, steps: int) -> list[BatchFile]:
        """Wait for the end of the run and of its clients; return its batches once they are examined."""
        output, _ = self.process.communicate(timeout=2 * WAIT_SECONDS)
        assert self.process.returncode == 0, output
        for client in self.clients:
            if client.poll() is None:  # it tries again for a while before it believes that the run has ended
                client.kill()
            told, _ = client.communicate()
            assert client.returncode in (0, -signal.SIGKILL) and "Traceback" not in told, told
        assert self.line.steps == list(range(1, steps + 1))
        return self.examined()

    def stopped(self) -> list[BatchFile]:
        """Stop the clients and the run; return its batches once they are examined."""
        for client in self.clients:
            assert client.poll() is None, client.communicate()[0]
            client.kill()
            client.communicate()
        interrupted(self.process)
        self.line.succeeds("audit", str(self.line.folder))
        return self.examined()

    def examined(self) -> list[BatchFile]:
        """Return the batches: audit and outside judge find nothing lost or trained twice, and nothing has drifted."""
        assert_rescored(self.line.audit())
        assert judge(self.line.folder).problems == ()
        batches = list(read_run(self.line.folder).batches.values())
        for batch in batches:
            # A context that drifts from its record adds a member to its group.
            assert {len(members) for _, members in batch.groups} == {GROUP_SIZE}
        return batches
