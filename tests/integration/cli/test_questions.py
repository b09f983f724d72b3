"""Questions of commands on a terminal."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import yaml


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
