"""A batch in parts on two ranks: the step of the whole batch on one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from rollmesh.trainer.learner.distributed import World

from ...kit.made_batches import write_random_model
from .parts_rank_process import BATCH, VERSIONS, first_moments, trainer_at_step_two
from .two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


def test_parts_on_two_ranks_give_the_step_of_the_whole_batch_on_one(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_random_model(model)
    out.mkdir()
    run_two_ranks("parts_rank_process", model, out)
    trainer = trainer_at_step_two(model, World())
    whole = trainer.train(BATCH, VERSIONS)
    parts = json.loads((out / "report.json").read_text())
    assert (whole.groups_before_cut, parts["groups_before_cut"]) == (0, 3)
    assert parts["loss"] == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert parts["grad_norm"] == pytest.approx(whole.grad_norm, rel=1e-6)
    # Not the weights: Adam divides a gradient near 0 by its size, rounding errors included.
    expected = torch.cat([moment.flatten() for _, moment in sorted(first_moments(trainer).items())])
    found = torch.cat([moment.flatten() for _, moment in sorted(load_file(out / "moments.safetensors").items())])
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
