"""Runs in places that lack locks, UTF-8 or room; commands at a terminal that asks, and stopped by signals."""

import json
import os
import pty
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from rollmesh.cli.main import app
from rollmesh.config import write_run_config

from ..launcher.test_launcher_outages import config
from ..trainer.test_waits import fill

RUN = {
    "name": "odd",
    "folder": "runs/odd",
    "model": {"path": "recipe:countdown"},
    "data": {"source": {"type": "countdown", "puzzles": 64}, "max_prompt_tokens": 64},
    "schedule": {"preset": "sync", "groups_per_batch": 2, "group_size": 2},
    "rollout": {"max_new_tokens": 16},
    "generator": {"max_context_tokens": 128},
    "trainer": {"train_steps": 1},
    "evaluation": {"before_and_after": False},
    "gateway": {"enabled": False},
}
UP = [sys.executable, "-P", "-m", "rollmesh.cli.main", "up", "run.yaml"]
# What NFS without lockd and Lustre without -o flock say: the system call flock (73, or 32 on ARM) is not served.
WITHOUT_LOCKS = """
import errno, platform, sys
from rollmesh.tasks.sandbox import kernel as calls
flock = {"x86_64": 73, "aarch64": 32}[platform.machine()]
refused = calls._returns(calls._EQUAL, flock, calls._ERROR | errno.ENOLCK)
calls.refuse_new_privileges()
steps = [calls._step(calls._LOAD, calls._NUMBER_AT), *refused, calls._step(calls._RETURN, calls._ALLOW)]
calls.filter_system_calls(b"".join(steps))
from rollmesh.cli.main import main
sys.argv[1:] = ["up", "run.yaml"]
main()
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(RUN))
    return tmp_path


def run(command: list[str], folder: Path | bytes, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=folder, stderr=subprocess.PIPE, text=True, **options)  # type: ignore[call-overload,no-any-return]


def test_a_file_system_without_locks_is_named_with_a_remedy(folder: Path) -> None:
    done = run([sys.executable, "-c", WITHOUT_LOCKS], folder)
    assert done.returncode == 2, done.stderr
    assert f"{folder / 'runs' / 'odd'}: its file system has no locks (No locks available); use a folder" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_whose_name_is_not_utf_8_is_refused_and_named(folder: Path) -> None:
    odd = os.fsencode(folder) + b"/caf\xe9"
    os.mkdir(odd)
    os.rename(folder / "run.yaml", odd + b"/run.yaml")
    done = run(UP, odd)
    assert done.returncode == 2, done.stderr
    assert r"folder=runs/odd: its path" in done.stderr and r"caf\udce9/runs/odd is not UTF-8 text" in done.stderr
    assert os.listdir(odd) == [b"run.yaml"]
    # A run elsewhere, whose run file and user code lie there, goes its way: it fails at the lock of a distant folder.
    named = run([*UP, "--set", "folder=/proc/no/run"], odd)
    assert "folder=/proc/no/run: cannot be created" in named.stderr
    option = run([*UP, "--folder", "r\udce9"], odd)
    assert option.returncode == 2 and "half of a surrogate pair" in option.stderr and "--set folder" in option.stderr


PRINTS = """
from rollmesh.report.console import run_console
console = run_console()
for n in range(3):
    console.print("a line" * 5000)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_console_without_room_says_so_once_and_the_program_ends_well(tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run([sys.executable, "-c", PRINTS], tmp_path, stdout=full)
    assert done.returncode == 0
    assert done.stderr == "the output cannot be written: No space left on device; the run goes on without it\n"


@pytest.mark.long
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_run_whose_output_has_no_room_is_audited_and_reported(folder: Path) -> None:
    with open("/dev/full", "w") as full:
        done = run(UP, folder, stdout=full)
    assert done.returncode == 0, done.stderr
    assert (folder / "runs" / "odd" / "report.html").stat().st_size > 0
    assert json.loads((folder / "runs" / "odd" / "audit.json").read_text())["verdict"] == "green"


def run_folder(disk: Path) -> Path:
    folder = disk / "run"
    folder.mkdir()
    write_run_config(config(folder), folder / "config.yaml")
    report = {"train_step": 1, "time": 1.0, "reward_mean": 0.5, "version": 1}
    (folder / "metrics.jsonl").write_text(json.dumps(report) + "\n")
    return folder


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (lambda disk: ["init", "countdown", str(disk / "mine")], "mine/"),
        (lambda disk: ["report", str(disk / "run")], "run/"),
        (lambda disk: ["audit", str(disk / "run")], "run/"),
        (lambda disk: ["sim", "--set", "trainer.train_steps=2", "--page", str(disk / "sim.html")], "sim.html"),
    ],
    ids=["init", "report", "audit", "sim"],
)
def test_a_command_on_a_full_disk_names_the_path(
    small_disk: Path, arguments: Callable[[Path], list[str]], file: str
) -> None:
    run_folder(small_disk)
    (small_disk / "mine").mkdir()
    fill(small_disk / "filler")
    done = CliRunner().invoke(app, arguments(small_disk))
    assert done.exit_code == 2, done.output
    assert "No space left on device" in done.stderr and str(small_disk / file) in done.stderr
    assert not list(small_disk.rglob("*.tmp")), "nothing half written is left"
    if file == "mine/":
        (small_disk / "filler").unlink()
        again = CliRunner().invoke(app, arguments(small_disk))
        assert again.exit_code == 0, again.output


def test_output_that_has_no_room_is_named_as_such() -> None:
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-m", "rollmesh", "sim", "--set", "trainer.train_steps=2"]
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        done = subprocess.run(
            command, env=buffered, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False
        )
    assert done.returncode == 2 and done.stderr.splitlines() == [
        "error standard output or error: [Errno 28] No space left on device"
    ]


def typed(answer: str, *words: str) -> tuple[int, str]:
    """Run a command on a terminal and answer its question; returns the exit status and what it printed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-m", "rollmesh", *words])
    shown, answered = b"", False
    while True:
        try:
            part = os.read(terminal, 4096)
        except OSError:  # the command has closed its terminal
            part = b""
        if not part:
            break
        shown += part
        if not answered and b"[y/N]" in shown:
            os.write(terminal, f"{answer}\n".encode())
            answered = True
    os.close(terminal)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), shown.decode()


def test_more_processes_than_the_machine_can_serve_are_asked_about_on_a_terminal(tmp_path: Path) -> None:
    run = {"name": "many", "folder": str(tmp_path / "run"), "model": {"path": str(tmp_path / "absent")}}
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump({**run, "generator": {"replicas": 5000}}))
    status, shown = typed("n", "up", str(file))
    assert status == 2
    assert "generator.replicas=5000" in shown and "Start them anyway? [y/N]" in shown
    assert "contains no config.json" not in shown
    status, shown = typed("y", "up", str(file))
    assert status == 2
    assert "contains no config.json" in shown, "the next check, of a model that is not there"
    assert not (tmp_path / "run").exists()


def test_ctrl_c_while_the_commands_are_imported_ends_the_process_without_a_trace() -> None:
    """The moment is chosen by what is imported: pydantic comes long before the last command."""
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    module, _, function = project["project"]["scripts"]["rollmesh"].partition(":")
    # A shell starts what it puts in the background with SIGINT ignored, and children inherit that.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    script = f"{heard}; from {module} import {function}; {function}()"
    # With a pipe this small the imports cannot run ahead of the signal.
    with subprocess.Popen(
        [sys.executable, "-X", "importtime", "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        pipesize=4096,
    ) as process:
        assert process.stderr is not None
        assert any(line.endswith(" pydantic.version\n") for line in process.stderr)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=60)
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest


def test_a_run_under_nohup_outlives_its_terminal() -> None:
    script = """
import asyncio, os, signal
from rollmesh.cli.common import shutdown_event

async def main():
    shutdown = shutdown_event()
    os.kill(os.getpid(), signal.SIGHUP)
    await asyncio.sleep(0)
    print("alive" if not shutdown.is_set() else "stopped")

asyncio.run(main())
"""
    command = ["nohup", sys.executable, "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout == "alive\n"
