"""Ranks that read different run files, as while a rolling upgrade replaces the trainer's pods: rank 0's counts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from rollmesh.config import load_run_config

from ...kit.made_batches import write_random_model
from .rank_process import BUDGET, OTHER_BUDGET, first_moments, ranks_of, train
from .two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("change", "groups_ahead"),
    [(f"trainer.tokens_per_microbatch={OTHER_BUDGET}", 0), ("trainer.learning_rate=0.02", 1)],
)
def test_a_rank_with_another_run_file_trains_the_step_of_rank_0(tmp_path: Path, change: str, groups_ahead: int) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_random_model(model)
    out.mkdir()
    run_file = tmp_path / "run.yaml"
    run = {
        "name": "ranks",
        "folder": str(tmp_path / "run"),
        "model": {"path": str(model)},
        "data": {"max_prompt_tokens": 16},
        "rollout": {"max_new_tokens": 64},
        "generator": {"max_context_tokens": 128},
        "trainer": {"learning_rate": 0.01, "device": "cpu", "tokens_per_microbatch": BUDGET},
    }
    run_file.write_text(yaml.safe_dump(run))
    run_two_ranks("read_other_settings", run_file, out, change, str(groups_ahead))
    alone = ranks_of(load_run_config(run_file, environ={}))
    whole = train(alone)
    report = json.loads((out / "report.json").read_text())
    assert report["groups_before_cut"] == groups_ahead
    assert report["loss"] == pytest.approx(whole.loss, rel=1e-6, abs=1e-6)
    assert report["grad_norm"] == pytest.approx(whole.grad_norm, rel=1e-6)
    # Not the weights: Adam divides a gradient near 0 by its size, rounding errors included.
    expected = torch.cat([moment.flatten() for _, moment in sorted(first_moments(alone.trainer).items())])
    found = torch.cat([moment.flatten() for _, moment in sorted(load_file(out / "moments.safetensors").items())])
    assert float((found - expected).norm()) <= 1e-6 * float(expected.norm())
