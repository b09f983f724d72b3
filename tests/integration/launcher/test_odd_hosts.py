"""Launchers where loopback is down, connections are refused, or modules have the names of libraries."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.config import RunConfig, write_run_config
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import service_spec

_CLONE_NEWNET = 0x40000000
_PROGRAM = """
import asyncio, sys
from pathlib import Path
from rollmesh.launcher.console_notes import ServiceWatch
from rollmesh.runtime.service_host import admin_server
from rollmesh.runtime.endpoints import Endpoint, published_endpoint
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.endpoints import Endpoint, AdminClient, ServiceStates

async def main(folder):
    noted = asyncio.Event()
    def note(text):
        print(text, flush=True)
        noted.set()
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1") as port, AdminClient() as client:
        with published_endpoint(folder, Endpoint(service="reward", index=0, admin=f"127.0.0.1:{port}", starting=True)):
            async with ServiceWatch(ServiceStates(folder, client), note).running(), asyncio.timeout(60):
                await noted.wait()

asyncio.run(main(Path(sys.argv[1])))
"""
LIBRARIES = ("redis", "types", "random", "numpy", "grpc", "torch", "yaml", "selectors", "queue", "pydantic")


def _leave_the_network() -> None:
    """Enter a network of its own, whose only interface, loopback, is down."""
    if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET) != 0:
        os._exit(77)


def test_a_launcher_without_loopback_says_that_its_services_cannot_be_reached_and_why(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PROGRAM, str(tmp_path)]
    done = subprocess.run(
        command, preexec_fn=_leave_the_network, capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode == 77:
        pytest.skip("no network namespaces here")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "waiting: reward-0: its admin port cannot be reached from here: Network is unreachable\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A user's folder: modules with the names of libraries, and a verifier beside its helper."""
    for name in LIBRARIES:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name} is hidden')\n")
    (tmp_path / "my_verifier.py").write_text(
        "import my_helper\ndef reward(response, metadata):\n    return my_helper.VALUE\n"
    )
    (tmp_path / "my_helper.py").write_text("VALUE = 1.0\n")
    rows = [f'{{"prompt": "1 2 {n} > 7 :", "answer": "7"}}\n' for n in range(3, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(rows))
    (tmp_path / "run").mkdir()
    return tmp_path


def run_of(folder: Path, ranks: int) -> RunConfig:
    return RunConfig.model_validate(
        {
            "name": "foreign",
            "folder": str(folder / "run"),
            "model": {"path": "recipe:countdown"},
            "data": {"source": {"type": "jsonl", "path": "rows.jsonl"}, "max_prompt_tokens": 64},
            "reward": {"verifier": "my_verifier:reward"},
            "rollout": {"max_new_tokens": 64},
            "generator": {"max_context_tokens": 512},
            "launcher": {"trainer_processes": ranks},
        }
    )


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
def test_services_and_the_trial_of_user_code_see_no_module_of_the_current_folder_before_a_library(
    folder: Path, ranks: int
) -> None:
    config = run_of(folder, ranks)
    run = folder / "run.yaml"
    write_run_config(config, run)
    command = service_spec(config, RunFolder(folder / "run"), {}, "trainer", 0).command
    interpreter = command[: command.index("trainer")]
    done = subprocess.run(
        [*interpreter, "config", "validate", str(run)], cwd=folder, capture_output=True, text=True, env=os.environ
    )
    assert "is hidden" not in done.stdout + done.stderr
    assert done.returncode == 0, done.stderr
    # The path is long, and the line may be broken anywhere.
    assert "".join(done.stdout.split()).count("run.yaml:valid") == ranks
