"""A whole run in one process: a breakpoint in the user's code stops there, and a long stop loses nothing."""

import fcntl
import json
import os
import pty
import select
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.store import EmbeddedServer

from .conftest import WAIT_SECONDS, CommandLine, assert_rescored, environment

ROWS = ("1 2 5 > 7 :", "3 4 9 > 5 :", "2 6 8 > 4 :", "1 4 7 > 8 :")
OWN_CODE = """
import itertools, os, sys
from pathlib import Path
from rollmesh.algorithms.losses import ppo_clip
from rollmesh.tasks.environments.environment_protocol import EnvironmentReply


def stop(*_):
    with open("stops.txt", "a") as file:
        print(sys._getframe(1).f_code.co_name, os.getpid(), file=file)


def reward(response, metadata):
    breakpoint()
    return float(len(response) % 2)


def loss(data, options):
    breakpoint()
    return ppo_clip(data, options)


turns = itertools.count()


class OneTurn:
    replayable = True

    async def reset(self, prompt):
        pass

    async def step(self, text, key):
        if Path("stops").exists() and next(turns) in (0, 160):
            breakpoint()
        return EnvironmentReply(text="", done=True, reward=float(len(text) % 2))

    async def aclose(self):
        pass


with open("imports.txt", "a") as file:
    print(os.getpid(), file=file)
"""
# Turn 160: a mesh admits 80 rollouts beyond those that it has trained, so some steps were trained; the run has 480.
SHORT = {"max_new_tokens": 16, "partial_save_tokens": 16}


@pytest.fixture
def own_code(small_run: Callable[..., CommandLine]) -> Callable[..., CommandLine]:
    """Write a run file of one replica each, next to the user's module and prompts."""

    def write(**sections: object) -> CommandLine:
        line = small_run(generator={"replicas": 1}, evaluation={"before_and_after": False}, rollout=SHORT, **sections)
        (line.run_file.parent / "own_code.py").write_text(OWN_CODE)
        rows = (json.dumps({"prompt": row, "answer": ""}) for row in ROWS)
        (line.run_file.parent / "data.jsonl").write_text("\n".join(rows))
        return line

    return write


@pytest.mark.long
def test_a_breakpoint_in_a_loss_and_in_a_verifier_stops_in_the_process_of_the_command(
    own_code: Callable[..., CommandLine], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = own_code(
        data={"source": {"type": "jsonl", "path": "data.jsonl"}},
        reward={"verifier": "own_code:reward"},
        trainer={"train_steps": 3, "algorithm": {"loss": "own_code:loss"}},
    )
    monkeypatch.setenv("PYTHONBREAKPOINT", "own_code.stop")
    monkeypatch.setenv("PYTHONPATH", str(line.run_file.parent))
    process = line.start("up", str(line.run_file), "--inline")
    output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    assert process.returncode == 0, output
    stops = (line.run_file.parent / "stops.txt").read_text().splitlines()
    assert {tuple(stop.split()) for stop in stops} == {("reward", str(process.pid)), ("loss", str(process.pid))}
    assert (line.run_file.parent / "imports.txt").read_text().split() == [str(process.pid)]
    assert line.steps == [1, 2, 3]
    assert "training to step 3" in output
    assert_rescored(line.audit())
    logged = [json.loads(text)["service"] for text in (line.folder / "logs/trainer-0.log").read_text().splitlines()]
    assert set(logged) == {"trainer-0"}


class Terminal:
    """The command on a terminal of its own, driven by text."""

    def __init__(self, line: CommandLine, *arguments: str) -> None:
        self._screen, terminal = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "rollmesh", *arguments],
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            env={**environment(), "TERM": "dumb"},
            cwd=line.run_file.parent,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(terminal)
        self.text = ""

    def see(self, text: str) -> None:
        """Read up to ``text``; what was read before it is gone."""
        deadline = time.monotonic() + WAIT_SECONDS
        while text not in self.text:
            assert time.monotonic() < deadline, f"waited for {text!r}:\n{self.text}"
            assert self.read(1.0), f"the command ended before {text!r}:\n{self.text}"
        self.text = self.text.partition(text)[2]

    def read(self, seconds: float) -> bool:
        """Read what is there; False after the end of the command."""
        if not select.select([self._screen], [], [], seconds)[0]:
            return True
        try:
            self.text += os.read(self._screen, 65536).decode(errors="replace")
        except OSError:
            return False
        return True

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def end(self) -> int:
        """Read to the end and return the exit status."""
        deadline = time.monotonic() + WAIT_SECONDS
        while self.read(1.0):
            assert time.monotonic() < deadline, self.text
        return self.process.wait(WAIT_SECONDS)

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._screen)


@pytest.mark.long
def test_pdb_in_an_environment_stops_the_mesh_beyond_every_expiry_and_ctrl_c_ends_it(
    own_code: Callable[..., CommandLine], wait_until: Callable[..., None]
) -> None:
    line = own_code(trainer={"train_steps": 30}, store={"heartbeat_seconds": 1.0, "session_ttl_seconds": 3.0})
    settings = ["--set", "rollout.program=environment", "--set", "rollout.environment=own_code:OneTurn"]
    stops: Path = line.run_file.parent / "stops"
    stops.touch()
    with Terminal(line, "up", str(line.run_file), "--inline", *settings) as screen:
        screen.see("(Pdb) ")
        screen.type("p text, self\n")
        screen.see("OneTurn object")

        def live_generators() -> list[object]:
            return json.loads(line.run("status", str(line.folder), "--json").stdout)["generators"]

        wait_until(lambda: live_generators() == [], "the end of every heartbeat's time to live", screen.process)
        screen.see("(Pdb) ")
        screen.type("c\n")
        screen.see("(Pdb) ")
        assert line.json_lines("metrics.jsonl"), "the mesh has trained since the first stop"
        stops.unlink()
        screen.type("\x03")
        screen.type("c\n")
        assert screen.end() == 130, screen.text
        assert "stopped; the same command continues this run" in screen.text
        assert "Traceback" not in screen.text
    assert EmbeddedServer(RunFolder(line.folder).redis).pid is None

    line.succeeds("up", str(line.run_file), "--inline", *settings)
    assert line.steps == list(range(1, 31))
    assert line.audit()
