"""A student learns from a teacher: the run file of docs/distillation.md, smaller, through the command line."""

from __future__ import annotations

import math
import os
import shutil
import signal
from pathlib import Path
from statistics import fmean

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from rollmesh.config.recipes import resolve_model
from rollmesh.config.teachers import teacher_service
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.store import EmbeddedServer

from .conftest import SMALL, WAIT_SECONDS, CommandLine, assert_rescored, end, merged, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "distil.yaml"
TEACHER = "recipe:countdown"


def worse_model(folder: Path) -> Path:
    """The teacher's model with noise on every weight, a tenth of the deviation of its tensor."""
    shutil.copytree(resolve_model(TEACHER), folder)
    file, random = folder / "model.safetensors", torch.Generator().manual_seed(0)
    weights = load_file(file)
    for weight in weights.values():
        weight += 0.1 * weight.std() * torch.randn(weight.shape, generator=random)
    save_file(weights, file, {"format": "pt"})
    return folder


def smaller_run(parent: Path, train_steps: int, replicas: int = 1) -> CommandLine:
    """The run file of the example, with other models and as small as the other runs of these tests."""
    changes = {
        "folder": str(parent / "run"),
        "model": {"path": str(worse_model(parent / "student"))},
        "teachers": {"trained": {"model": TEACHER}},
        "trainer": {"train_steps": train_steps},
        "generator": {"replicas": replicas},
    }
    file = parent / "run.yaml"
    file.write_text(yaml.safe_dump(merged(merged(yaml.safe_load(EXAMPLE.read_text()), SMALL), changes)))
    return CommandLine(run_file=file, folder=parent / "run")


def reverse_kls(line: CommandLine) -> list[float]:
    return [float(step["batch"]["reverse_kl"]) for step in line.json_lines("metrics.jsonl")]


def test_a_student_trains_on_the_scores_of_a_teacher(tmp_path: Path) -> None:
    line = smaller_run(tmp_path, train_steps=2)
    done = line.run("up", str(line.run_file), "--inline", "--set", "evaluation.before_and_after=false")
    assert done.returncode == 0, done.stdout + done.stderr
    assert_rescored(line.audit())
    found = reverse_kls(line)
    assert len(found) == 2 and all(math.isfinite(value) and value > 0 for value in found), found


@pytest.mark.long
@pytest.mark.slow
def test_the_student_comes_nearer_to_its_teacher_whatever_is_killed(tmp_path: Path) -> None:
    line = smaller_run(tmp_path, train_steps=24, replicas=2)
    process = line.start("up", str(line.run_file))
    try:
        for number, service in enumerate((teacher_service("trained"), "rollout", "trainer")):
            until(lambda wanted=4 * number + 2: len(line.steps) >= wanted, f"a step before {service} ends", process)
            (endpoint,) = read_endpoints(line.folder, service)
            os.kill(endpoint.pid, signal.SIGKILL)
        output, _ = process.communicate(timeout=2 * WAIT_SECONDS)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            end(process)
        EmbeddedServer(RunFolder(line.folder).redis).kill()
    assert process.returncode == 0, output
    assert_rescored(line.audit())
    found = reverse_kls(line)
    assert len(found) == 24
    assert fmean(found[-8:]) < 0.5 * fmean(found[:8]), found
