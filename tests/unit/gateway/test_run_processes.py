"""Processes of a run: found in the launcher's process tree, with the logs of those that have ended."""

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.gateway import run_processes
from rollmesh.gateway.models.items import ProcessView
from rollmesh.gateway.run_processes import RunProcesses, service_of
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import service_specs
from rollmesh.runtime.locks import LOCK_FILE, lock_text
from rollmesh.runtime.request_guard import NotFound

from ...kit.run_files import made_run

DEADLINE_SECONDS = 300.0
_BUSY = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
print(child.pid, flush=True)
sys.stdin.read()
child.kill()
"""
"""A service whose child uses a core until the input ends."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "logs").mkdir()
    (tmp_path / LOCK_FILE).write_text(lock_text())  # this process is the launcher
    return tmp_path


@pytest.fixture
def trainer() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", _BUSY, "rollmesh.cli.main", "trainer", "run.yaml", "--index", "0"]
    process = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdout.readline().strip().isdecimal()
    yield process
    process.communicate("")


def _listed(processes: RunProcesses) -> dict[str, ProcessView]:
    return {each.name: each for each in asyncio.run(processes.list()).processes}


@pytest.mark.parametrize("ranks", [1, 2])
def test_every_command_of_the_launcher_names_its_service(tmp_path: Path, ranks: int) -> None:
    config = made_run(
        tmp_path,
        generator={"replicas": 2},
        launcher={"trainer_processes": ranks, "reward_replicas": 3, "agents_replicas": 2},
        agents={"enabled": True},
        teachers={"large-1": {"model": "m", "replicas": 2}, "far": {"address": "far:7070", "domains": ["law"]}},
        trainer={"algorithm": {"teacher": {"reverse_kl_coefficient": 1}}},
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}, "domain_field": "domain"},
    )
    specs = service_specs(config, RunFolder(tmp_path), {})
    assert len(specs) >= 11
    teachers = [spec.name for spec in specs if spec.service.startswith("teacher")]
    assert teachers == ["teacher-large-1-0", "teacher-large-1-1"]
    assert [spec.index for spec in specs if spec.service == "agents"] == [0, 1]
    assert [service_of(spec.command) for spec in specs] == [spec.name for spec in specs]
    assert service_of(["redis-server", "--port", "0"]) is None
    assert service_of(["python", "-m", "rollmesh.cli.main", "status"]) is None


def test_memory_and_cpu_of_a_service_include_its_children(
    folder: Path, trainer: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_processes, "_LEAST_SECONDS", 0.0)
    (folder / "logs" / "trainer-0.log").write_text("started\n")
    processes = RunProcesses(folder)
    first = _listed(processes)["trainer-0"]
    assert (first.pid, first.cpu_share, first.log_bytes) == (trainer.pid, None, 8)
    assert first.memory_bytes is not None and first.memory_bytes > 2 << 20
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not _listed(processes)["trainer-0"].cpu_share:  # the service itself only waits
        assert time.monotonic() < deadline, "the child uses a core"
    assert _listed(processes)["launcher-0"].memory_bytes


def test_a_process_that_has_ended_leaves_its_log(folder: Path) -> None:
    (folder / "logs" / "generator-10.log").write_text("a\n")
    (folder / "logs" / "generator-9.log").write_text("")
    listed = _listed(RunProcesses(folder))
    assert [name for name in listed if name.startswith("generator")] == ["generator-9", "generator-10"]
    ended = listed["generator-10"]
    assert (ended.pid, ended.memory_bytes, ended.cpu_share, ended.log_bytes) == (None, None, None, 2)
    (folder / LOCK_FILE).write_text("1 another-host")
    assert list(_listed(RunProcesses(folder))) == ["generator-9", "generator-10"], "without a launcher here, logs only"


def test_the_end_of_a_log_is_its_last_lines(folder: Path) -> None:
    (folder / "logs" / "reward-0.log").write_text("".join(f"line {number}\n\n" for number in range(50_000)))
    tail = asyncio.run(RunProcesses(folder).log("reward-0", 3))
    assert tail.lines == ["line 49997", "line 49998", "line 49999"]
    with pytest.raises(NotFound, match="no log of reward-1"):
        asyncio.run(RunProcesses(folder).log("reward-1", 3))
