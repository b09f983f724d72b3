"""Bad rows and verifiers and a lost Redis end in a clear error, or are survived; more in tests/integration/cli."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollmesh.preflight.trial import FIRST_ROWS
from rollmesh.runtime.lifecycle import EXIT_CONFIG
from rollmesh.store import EmbeddedServer

from .conftest import WAIT_SECONDS, CommandLine, write_small_run

pytestmark = pytest.mark.slow

HardRun = tuple[CommandLine, subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]
"""The run file, how the run ended, and how the second launcher ended."""

MOODY_VERIFIER = """
import itertools
import math

calls = itertools.count()

def reward(response, metadata):
    match next(calls) % 16:
        case 0: return math.nan
        case 1: return "1.0"
    return float(metadata["answer"] in response)
"""
"""Its moods depend on nothing that is sampled: lengths of answers, for one, may miss a mood in a whole run."""


def write_rows(folder: Path) -> dict[str, Any]:
    """Countdown prompts as a table, for verifiers of one's own; returns the ``data`` section."""
    puzzles = [(a, b, c) for a in range(1, 5) for b in range(5, 7) for c in range(7, 10)]
    rows = [{"prompt": f"{a} {b} {c} > {b - a} :", "answer": str(b - a)} for a, b, c in puzzles]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "moody.py").write_text(MOODY_VERIFIER)
    return {"source": {"type": "jsonl", "path": "rows.jsonl"}}


@pytest.mark.long
def test_a_bad_row_after_the_first_ones_ends_the_run_at_once_and_the_error_names_its_line(tmp_path: Path) -> None:
    good = [{"prompt": f"{a} {b} 5 > 7 :", "answer": "7"} for a in range(1, 10) for b in range(1, 10)]
    rows = [*(good * (1 + FIRST_ROWS // len(good))), {"question": "1 2 5 > 7 :", "answer": "7"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    line = write_small_run(
        tmp_path,
        data={"source": {"type": "jsonl", "path": "rows.jsonl"}},
        reward={"verifier": "exact"},
        generator={"replicas": 1},
        evaluation={"before_and_after": False},
    )
    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    assert f"rows.jsonl:{len(rows)}: field 'prompt' is missing; the row has question, answer" in done.stderr
    assert str(line.folder / "logs" / "rollout-0.log") in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"reward": {"verifier": "no_such_module:reward"}}, "reward.verifier: no module 'no_such_module'"),
        ({"reward": {"options": {"strictness": 3}}}, "reward.options: countdown got an unexpected keyword"),
    ],
)
def test_a_service_that_cannot_start_says_so_with_a_status_of_its_own(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    line = write_small_run(tmp_path, **sections)
    done = line.run("reward", str(line.run_file))
    assert done.returncode == EXIT_CONFIG, done.stderr
    last = json.loads(done.stderr.splitlines()[-1])
    assert message in last["message"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    """A Redis that the launcher does not start and cannot restart."""
    own = EmbeddedServer(tmp_path_factory.mktemp("redis"))
    own.start()
    yield own
    own.kill()


@pytest.fixture(scope="module")
def hard_run(tmp_path_factory: pytest.TempPathFactory, server: EmbeddedServer) -> HardRun:
    """A whole run whose verifier fails now and then, with a second launcher while Redis is unreachable."""
    parent = tmp_path_factory.mktemp("hard")
    line = write_small_run(
        parent,
        data=write_rows(parent),
        reward={"verifier": "moody:reward"},
        # Redis comes back as another server: until a session would have expired, nothing is leased.
        store={"url": server.url, "heartbeat_seconds": 1.0, "session_ttl_seconds": 5.0},
        generator={"replicas": 1},
        trainer={"train_steps": 12},
        evaluation={"before_and_after": False},
    )
    launcher = line.start("up", str(line.run_file))
    try:
        line.trains(launcher)
        server.kill()
        second = line.run("up", str(line.run_file))
        server.start()
        output, _ = launcher.communicate(timeout=2 * WAIT_SECONDS)
    finally:
        if launcher.poll() is None:
            launcher.send_signal(signal.SIGINT)
            output, _ = launcher.communicate(timeout=WAIT_SECONDS)
    return line, subprocess.CompletedProcess([], launcher.returncode, output, ""), second


@pytest.mark.long
def test_a_run_with_a_moody_verifier_a_lost_redis_and_a_second_launcher_loses_nothing(hard_run: HardRun) -> None:
    line, done, second = hard_run
    assert done.returncode == 0, done.stdout
    assert line.audit()
    assert line.steps == list(range(1, 13))
    assert "redis_restarted" in (line.folder / "logs" / "trainer-0.log").read_text()
    assert second.returncode == 2 and "another launcher" in second.stderr
    # What is no number is named and never trained on.
    log = (line.folder / "logs" / "reward-0.log").read_text()
    assert "moody:reward: returned nan, expected a finite number" in log
    assert "moody:reward: returned '1.0' (str), expected a finite number" in log
    assert sum(step["batch"]["unscored_trajectories"] for step in line.json_lines("metrics.jsonl")) == 0


@pytest.mark.long
def test_a_finished_run_goes_back_when_it_is_next_started_and_to_no_unknown_version(hard_run: HardRun) -> None:
    line, _, _ = hard_run
    unknown = line.run("rollback", str(line.folder), "--version", "99")
    assert unknown.returncode == 2
    assert "policy version 99 has not been announced" in unknown.stderr
    known = line.run("rollback", str(line.folder), "--version", "10")
    assert known.returncode == 0, known.stderr
    assert "rollback to policy version 10 requested" in known.stdout
    again = line.run("up", str(line.run_file))
    assert again.returncode == 0, again.stdout
    (manifest,) = line.folder.glob("checkpoints/policies/*r1/manifest.json")
    made = json.loads(manifest.read_text())
    assert (made["policy_version"], made["train_step"], made["parent"]) == (13, 12, 10)
