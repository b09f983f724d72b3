"""Whole runs through the command line, as a user starts them."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import yaml

from rollmesh.launcher.run_folder import RunFolder
from rollmesh.report.audit_result import LEAST_MEAN_TOKENS
from rollmesh.store import EmbeddedServer

from ..kit import waiting

SMALL = {
    "schedule": {"preset": "copris", "groups_per_batch": 4, "group_size": 4, "pool_size": 24, "max_staleness": 4},
    "generator": {"replicas": 2, "slots": 32},
    "trainer": {"train_steps": 6, "learning_rate": 4e-4},
    "evaluation": {"prompt_count": 32},
    "rollout": {"max_new_tokens": 128, "partial_save_tokens": 16},
    "gateway": {"enabled": False},
}
"""A run of the demo's model and task that takes seconds once its processes are up; a test that needs a page says so."""
ENDLESS = 100_000
"""Train steps of a run that is stopped once everything was seen: however slow the test, it does not end before."""
WAIT_SECONDS = 300.0
"""Seconds for what takes seconds on an idle machine: two whole meshes may share two slow cores."""
_TEST_SECONDS = 1200
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every deadline inside of a test passes first and says what it waited for."""
    for item in items:
        if item.path.is_relative_to(_HERE) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(_TEST_SECONDS))


@dataclass(frozen=True)
class CommandLine:
    """``rollmesh`` as a subprocess."""

    run_file: Path
    folder: Path

    def command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "rollmesh.cli.main", *arguments]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*arguments),
            capture_output=True,
            text=True,
            timeout=2 * WAIT_SECONDS,
            check=False,
            env=environment(),
            cwd=self.run_file.parent,
        )

    def succeeds(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start(self, *arguments: str, output: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.command(*arguments),
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
            cwd=self.run_file.parent,
        )

    @property
    def steps(self) -> list[int]:
        """The train steps that have a report."""
        return [step["train_step"] for step in self.json_lines("metrics.jsonl")]

    def serving(self) -> int:
        """Generators that serve, by the last look of the timeline."""
        looks = self.json_lines("timeline.jsonl")
        return sum(generator["serving"] for generator in looks[-1]["generators"]) if looks else 0

    def trains(self, process: subprocess.Popen[str], more: int = 1) -> None:
        """Wait for further train steps."""
        wanted = len(self.steps) + more
        until(lambda: len(self.steps) >= wanted, f"train step {wanted}", process)

    def audit(self) -> dict[str, Any]:
        """Return the audit of a run that has ended, which must be green."""
        audit: dict[str, Any] = json.loads((self.folder / "audit.json").read_text())
        found = (audit["green"], audit["lost"], audit["trained_twice"], audit["staleness_violations"])
        assert found == (True, [], {}, []), audit
        return audit

    def json_lines(self, name: str) -> list[dict[str, Any]]:
        """The lines that are complete: the last one may be under way."""
        file = self.folder / name
        text = file.read_text() if file.exists() else ""
        return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def assert_rescored(audit: dict[str, Any]) -> None:
    """The log-probabilities of what was trained are those of the checkpoints that they name.

    Of single tokens this is asked as the audit asks it: within 1e-4 nats, or as near as float32 can tell. How far the
    few others are off, that the audit excuses, is chance.
    """
    rescoring = audit["rescoring"]
    versions = [version for version in rescoring["versions"] if version["tokens"] and not version["skipped"]]
    assert rescoring["tokens"] == sum(version["tokens"] for version in versions) > 0
    assert rescoring["bound"] == 1e-4 and [version["over_bound"] for version in versions] == [0] * len(versions)
    # Scored by a neighbouring policy version they are some 1e-3 off in the mean, by their own some 1e-7.
    assert all(version["mean_gap"] < 1e-5 for version in versions if version["tokens"] >= LEAST_MEAN_TOKENS)
    # One token of 540,055 in one demo and none of 550,644 in another.
    assert sum(version["unresolvable"] for version in versions) <= max(20, 1e-3 * rescoring["tokens"])


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "COLUMNS": "160"}


def merged(base: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in extra.items():
        # A source is one choice of several: another type brings its own fields.
        section = isinstance(value, dict) and "type" not in value
        result[key] = merged(result.get(key, {}), value) if section else value
    return result


def write_small_run(parent: Path, **sections: Any) -> CommandLine:
    """Write a small run file into ``parent`` with the given sections changed."""
    from rollmesh.config.recipes import recipe_file

    demo = yaml.safe_load(recipe_file("countdown", "demo.yaml").read_text())
    folder = parent / "run"
    data = merged(merged(demo, SMALL), {"name": "small", "folder": str(folder), **sections})
    file = parent / "run.yaml"
    file.write_text(yaml.safe_dump(data))
    return CommandLine(run_file=file, folder=folder)


@pytest.fixture
def small_run(tmp_path: Path) -> Iterator[Callable[..., CommandLine]]:
    """Write a small run file with the given sections changed."""
    yield partial(write_small_run, tmp_path)
    # The embedded server outlives a launcher that was killed, for the next launcher: no launcher follows here.
    EmbeddedServer(RunFolder(tmp_path / "run").redis).kill()


def until(
    condition: Callable[[], bool],
    what: str,
    process: subprocess.Popen[str] | None = None,
    seconds: float = WAIT_SECONDS,
) -> None:
    """Wait for a condition; the process, if given, must stay alive meanwhile."""

    def alive() -> None:
        if process is not None and process.poll() is not None:
            output = process.stdout.read() if process.stdout else ""
            pytest.fail(f"the process ended with {process.returncode} while waiting for {what}:\n{output}")

    waiting.until(condition, what, seconds, check=alive, pause=0.1)


@pytest.fixture
def wait_until() -> Callable[..., None]:
    """``until``, for tests."""
    return until


@pytest.fixture
def started(
    small_run: Callable[..., CommandLine],
) -> Iterator[Callable[..., tuple[CommandLine, subprocess.Popen[str]]]]:
    """Start ``rollmesh up`` on a small run in the background; whatever still runs is stopped at the end."""
    processes: list[subprocess.Popen[str]] = []

    def start(**sections: Any) -> tuple[CommandLine, subprocess.Popen[str]]:
        line = small_run(**sections)
        process = line.start("up", str(line.run_file))
        processes.append(process)
        return line, process

    yield start
    running = [process for process in processes if process.poll() is None]
    for process in running:
        process.send_signal(signal.SIGINT)
    for process in running:
        end(process)


def interrupted(process: subprocess.Popen[str], seconds: float = WAIT_SECONDS) -> str:
    """Press Ctrl-C, which ends a run, and return what it has printed."""
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == 130, output
    return output


def end(process: subprocess.Popen[str]) -> None:
    """Wait for a run that was told to stop; one that does not is killed, and takes its services along."""
    try:
        process.communicate(timeout=WAIT_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate(timeout=WAIT_SECONDS)
