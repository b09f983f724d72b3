"""One command trains a real model through real services, and nothing is lost or trained twice."""

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import EmbeddedServer

from .conftest import ENDLESS, WAIT_SECONDS, CommandLine, assert_rescored, interrupted, write_small_run

pytestmark = pytest.mark.slow

STEPS = 32
"""More than a run gets to between a second step and Ctrl-C, with the batches that were ready by then, at the pace."""
PACE = [[1, 0.02]]
"""Seconds that a decode step takes at least, however fast the machine is."""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    """A run that one command has trained to its end."""
    # At this pace the trainer does not run away from an evaluation.
    evaluation = {"prompt_count": 32, "every_versions": 3}
    line = write_small_run(tmp_path_factory.mktemp("finished"), evaluation=evaluation, generator={"pace": PACE})
    line.succeeds("up", str(line.run_file))
    yield line
    EmbeddedServer(line.folder / "redis").kill()


@pytest.mark.long
def test_one_command_trains_evaluates_audits_and_reports(finished: CommandLine) -> None:
    line = finished
    assert line.steps == [1, 2, 3, 4, 5, 6]
    evaluations = line.json_lines("evaluations.jsonl")
    assert [(e["policy_version"], e["n"]) for e in evaluations] == [(0, 32), (3, 32), (6, 32)]
    assert all(0 < e["standard_error"] < 0.1 for e in evaluations)
    # The first one begins when nothing runs yet, the last one when no rollout is left: the mesh is theirs alone.
    first, _, last = evaluations
    looks = [(look["t"], look["view"]["leased"]) for look in line.json_lines("timeline.jsonl")]
    before, after = ([leased for t, leased in looks if t < first["when"]], [n for t, n in looks if t > last["when"]])
    assert set(before) == set(after) == {0}
    assert_rescored(line.audit())
    assert (line.folder / "report.html").stat().st_size > 10_000

    status = line.run("status", str(line.folder), "--json")
    assert json.loads(status.stdout)["view"]["trained_step"] == 6
    explained = line.succeeds("explain", str(line.folder), "6", "--json")
    (trajectory,) = json.loads(explained.stdout)["trajectories"]
    found = line.run("explain", str(line.folder), "--trajectory", trajectory["trajectory_id"], "--json")
    assert [status["train_step"] for status in json.loads(found.stdout)] == [6]
    unnamed = line.run("explain", str(line.folder))
    assert unnamed.returncode == 2
    assert "give the train step of a batch, or --trajectory" in unnamed.stderr
    line.succeeds("audit", str(line.folder), "--json")


@pytest.mark.long
def test_a_backup_into_the_run_itself_or_over_another_run_is_refused(finished: CommandLine, tmp_path: Path) -> None:
    inside = finished.run("backup", str(finished.folder), str(finished.folder / "backup"))
    assert inside.returncode == 2
    assert "lies inside" in inside.stderr
    done = finished.succeeds("backup", str(finished.folder), str(tmp_path / "copy"))
    assert done.stdout.endswith(f"train step 6: rollmesh up RUN.yaml --set folder={tmp_path / 'copy'}\n")
    (tmp_path / "copy" / "checkpoints" / "lineage").write_text("another")
    other = finished.run("backup", str(finished.folder), str(tmp_path / "copy"))
    assert other.returncode == 2
    assert "another run" in other.stderr


def test_ctrl_c_drains_and_a_second_start_continues_the_run(started, wait_until) -> None:
    line, process = started(trainer={"train_steps": STEPS}, generator={"pace": PACE})
    line.trains(process)
    # A trainer that an operator stops ends well, and is started again: its work is not done.
    (trainer,) = read_endpoints(line.folder, "trainer")
    os.kill(trainer.pid, signal.SIGTERM)
    wait_until(lambda: [e.pid for e in read_endpoints(line.folder, "trainer")] != [trainer.pid], "its end", process)
    line.trains(process)
    output = interrupted(process)
    assert "starting it again" in output
    assert len(line.steps) < STEPS
    looks = len(line.json_lines("timeline.jsonl"))
    assert line.run("status", str(line.folder)).returncode == 0  # starts the queue's server and stops it again

    unpaced = ("up", str(line.run_file), "--set", "generator.pace=null")
    assert any(stopped_in_its_audit(line, *unpaced) for _ in range(3)), "Ctrl-C never met the audit"
    assert not any(look["view"]["recovering"] for look in line.json_lines("timeline.jsonl")[looks:])

    line.succeeds(*unpaced)
    assert line.steps == list(range(1, STEPS + 1))
    assert line.audit()


def stopped_in_its_audit(line: CommandLine, *command: str) -> bool:
    """Press Ctrl-C as the audit begins. False where the audit ended before: then it is taken away, for another try."""
    with line.start(*command) as auditing:
        for text in auditing.stdout:
            if text.startswith("auditing"):
                auditing.send_signal(signal.SIGINT)
                break
        output, _ = auditing.communicate(timeout=WAIT_SECONDS)
    file = line.folder / "audit.json"
    if file.exists():
        file.unlink()
        return False
    assert auditing.returncode == 130, output
    return True


@pytest.mark.long
def test_a_run_that_diverges_fails_and_says_so_everywhere(small_run) -> None:
    """Its weights are useless after one step: the trainer publishes none that no generator can serve."""
    line = small_run(trainer={"train_steps": 12, "learning_rate": 1e30})
    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    failure = json.loads((line.folder / "failure.json").read_text())["message"].splitlines()[0]
    assert "TrainingDiverged: train step 1" in failure
    assert failure in done.stderr
    assert json.loads(line.run("status", str(line.folder), "--json").stdout)["failure"].startswith(failure)
    assert json.dumps(failure)[1:-1].replace("<", "\\u003c") in (line.folder / "report.html").read_text()
    audit = line.run("audit", str(line.folder), "--json")
    assert audit.returncode == 1
    assert any(problem.startswith(f"the run failed: {failure}") for problem in json.loads(audit.stdout)["problems"])


@pytest.mark.long
def test_a_report_that_cannot_be_written_ends_no_run_and_a_damaged_batch_file_ends_it_at_once(started) -> None:
    line, process = started(trainer={"train_steps": ENDLESS}, evaluation={"before_and_after": False})
    line.trains(process)
    (line.folder / "report.html").mkdir()  # as on a full disk: the file cannot be made
    output = interrupted(process)
    assert "the report cannot be written: " in output
    assert "Traceback" not in output
    shutil.rmtree(line.folder / "checkpoints" / "states")  # so that the first step is trained again from its file
    file = min((line.folder / "checkpoints" / "batches").glob("*.pb"))
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)

    done = line.run("up", str(line.run_file))
    assert done.returncode == 2, done.stdout
    assert "the report cannot be written: " in done.stdout  # and that does not hide why the run failed
    assert "trainer-0 cannot continue: CheckpointError: " in done.stderr
    assert file.name in done.stderr
    assert "restart 1 of" not in done.stdout
    assert file.name in json.loads(line.run("status", str(line.folder), "--json").stdout)["failure"]
