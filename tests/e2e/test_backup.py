"""A backup taken while a run trains continues in another folder."""

import json
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from rollmesh.store import EmbeddedServer

from .conftest import WAIT_SECONDS

pytestmark = pytest.mark.long

STEPS = 40
"""More than it gets to before it is lost, at the pace of its generators."""


def lose(machine: subprocess.Popen[str], folder: Path) -> None:
    """Kill a launcher and all that it started, the queue's server too, and delete the run: nothing is left of it."""
    processes = psutil.Process(machine.pid).children(recursive=True)
    machine.kill()
    machine.communicate(timeout=WAIT_SECONDS)
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # services end by themselves when their launcher dies
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=WAIT_SECONDS)
    assert not alive
    EmbeddedServer(folder / "redis").kill()
    shutil.rmtree(folder)


def test_a_backup_of_a_training_run_continues_elsewhere_with_an_empty_queue(started, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    line, process = started(
        trainer={"train_steps": STEPS},
        generator={"pace": [[1, 0.05]]},
        checkpoints={"folder": str(checkpoints), "keep_last": 2, "state_every_steps": 2},
    )
    copy = line.folder.with_name("copy")
    line.trains(process, 3)
    first = json.loads(line.run("backup", str(line.folder), str(copy), "--json").stdout)
    line.trains(process, 8)
    second = json.loads(line.run("backup", str(line.folder), str(copy), "--json").stdout)
    assert second["train_step"] > first["train_step"] > 0
    assert second["removed"] > 0
    lose(process, line.folder)
    shutil.rmtree(checkpoints)

    elsewhere = ("--set", f"folder={copy}", "--set", "checkpoints.folder=null")
    line.succeeds("up", str(line.run_file), *elsewhere, "--set", "generator.pace=null")
    audit = json.loads((copy / "audit.json").read_text())
    # Two policies are kept of forty, as the run file has it: the others are the only thing that is not checked.
    assert (audit["verdict"], audit["problems"], len(audit["unchecked"])) == ("incomplete", [], 1)
    assert audit["rescoring"]["pruned_tokens"] > 0
    assert (audit["lost"], audit["trained_twice"]) == ([], {})
    steps = [json.loads(row)["train_step"] for row in (copy / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
