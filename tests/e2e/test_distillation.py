"""A student learns from a teacher: the run file of docs/distillation.md, smaller, through the command line."""

import math
import shutil
from pathlib import Path

import torch
import yaml
from safetensors.torch import load_file, save_file

from rollmesh.config.recipes import resolve_model

from .conftest import SMALL, CommandLine, assert_rescored, merged

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


def test_a_student_trains_on_the_scores_of_a_teacher(tmp_path: Path) -> None:
    changes = {
        "folder": str(tmp_path / "run"),
        "model": {"path": str(worse_model(tmp_path / "student"))},
        "teachers": {"trained": {"model": TEACHER}},
        "trainer": {"train_steps": 2},
        "generator": {"replicas": 1},
        "evaluation": {"before_and_after": False},
    }
    line = CommandLine(run_file=tmp_path / "run.yaml", folder=tmp_path / "run")
    line.run_file.write_text(yaml.safe_dump(merged(merged(yaml.safe_load(EXAMPLE.read_text()), SMALL), changes)))
    line.succeeds("up", str(line.run_file), "--inline")
    assert_rescored(line.audit())
    found = [float(step["batch"]["reverse_kl"]) for step in line.json_lines("metrics.jsonl")]
    assert len(found) == 2 and all(math.isfinite(value) and value > 0 for value in found), found
