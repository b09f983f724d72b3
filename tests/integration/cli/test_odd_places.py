"""Runs in places that lack something: locks, names in UTF-8, room for the output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

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
