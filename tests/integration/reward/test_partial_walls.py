"""A reward service of an ordinary user on a machine without user namespaces says what it cannot keep code from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.config.load import write_run_config

from .reward_bench import WAIT_SECONDS, make_config

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="namespaces and seccomp are Linux's")

ORDINARY_UID = 23_457
START = """
import os, sys
from pathlib import Path
from rollmesh.tasks.sandbox import host_folders, kernel
uid = int(sys.argv[1])
if os.geteuid() == 0:
    host_folders.expose([Path(sys.base_prefix).resolve()])
    os.setgroups([])
    os.setresgid(uid, uid, uid)
    os.setresuid(uid, uid, uid)
kernel.refuse_new_privileges()
kernel.filter_system_calls(kernel.call_filter(may_fork=True))  # it refuses new namespaces to all that follows
os.execv(sys.executable, [sys.executable, "-m", "rollmesh.cli.main", "reward", sys.argv[2]])
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that the ordinary user may write to."""
    with tempfile.TemporaryDirectory(prefix="partial-walls-") as name:
        yield Path(name)


def start(folder: Path, **options: object) -> subprocess.Popen[str]:
    """The service, as a user without namespaces."""
    config = make_config(folder, verifier="python_code", options=options)
    (folder / "run").mkdir()
    write_run_config(config, folder / "run.yaml")
    if os.geteuid() == 0:
        for path in (folder, *folder.rglob("*")):
            os.chown(path, ORDINARY_UID, ORDINARY_UID)
    uid = ORDINARY_UID if os.geteuid() == 0 else os.geteuid()
    command = [sys.executable, "-c", START, str(uid), str(folder / "run.yaml")]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def test_code_is_refused_unless_the_run_file_allows_it(folder: Path) -> None:
    process = start(folder)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 78
    assert "could change this user's files, checkpoints and Redis included" in output
    assert "allow_shared_uid" in output


def test_what_remains_open_is_logged_when_the_run_file_allows_it(folder: Path) -> None:
    process = start(folder, allow_shared_uid=True)
    assert process.stdout is not None
    lines = []
    deadline = time.monotonic() + WAIT_SECONDS
    for line in process.stdout:
        lines.append(line)
        if "code_is_confined_in_part" in line or time.monotonic() > deadline:
            break
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=WAIT_SECONDS)
    said = lines[-1]
    assert "code_is_confined_in_part" in said, "".join(lines)
    assert "use every folder and socket that its uid or all users may" in said
    assert "the ports of this run on loopback" in said
    assert "each with its own memory limit" not in said, "the filter of system calls needs no namespace"
