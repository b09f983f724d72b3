"""Two processes with FSDP2 compute what one process computes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import Starcoder2Config

from rollmesh.checkpoints.committed import judge_states
from rollmesh.checkpoints.states import load_state
from rollmesh.trainer.learner.distributed import World

from ...kit.made_batches import SHAPE, write_random_model
from ...kit.trainer_reference import largest_difference, weights_of
from .rank_process import RECIPES, SECRET, STEPS, VERSIONS, last_batch, make_trainer, run
from .two_ranks import run_two_ranks

pytestmark = pytest.mark.slow


def numbers(report: Any, path: str = "") -> dict[str, float]:
    """Every number of a report by its path, wall times left out."""
    if isinstance(report, dict):
        return {k: v for key, item in report.items() for k, v in numbers(item, f"{path}.{key}").items()}
    if isinstance(report, list):
        return {k: v for i, item in enumerate(report) for k, v in numbers(item, f"{path}.{i}").items()}
    split_of_work = (".seconds", ".microbatches", ".forward_tokens")
    return {} if report is None or any(word in path for word in split_of_work) else {path: float(report)}


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_two_processes_equal_one_in_float64(tmp_path: Path, recipe: str) -> None:
    # Tied embeddings share one sharded parameter. Its norms compute in float64, others in float32 for every dtype: two
    # processes share prefixes and one does not, which rounds the last bit otherwise.
    model, two, one = tmp_path / "model", tmp_path / "two", tmp_path / "one"
    write_random_model(model, config=Starcoder2Config(**SHAPE, tie_word_embeddings=True))
    two.mkdir()
    run_two_ranks("train_recipe", model, two, recipe)
    trainer = make_trainer(model, recipe, World(), one)
    reports = run(trainer, one)
    for step in range(1, STEPS + 1):
        assert largest_difference(weights_of(two / str(step)), weights_of(one / str(step))) < 1e-8
    if recipe == "loglinear_ess":
        assert all(0 < report["rate_factor"] < 1 for report in reports)
    if recipe == "recompute_m2po":
        assert all(report["batch"]["masked_tokens"]["m2po"] > 0 for report in reports)
    for alone, shared in zip(reports, json.loads((two / "reports.json").read_text()), strict=True):
        assert numbers(alone) == pytest.approx(numbers(shared), rel=1e-6, abs=1e-8)
        assert shared["forward_tokens"] < alone["forward_tokens"]
    trainer.train(last_batch(), VERSIONS)
    trainer.export(one / "continued")
    assert largest_difference(weights_of(two / "continued"), weights_of(one / "continued")) < 1e-8
    # What two ranks saved, one process loads.
    (state,) = judge_states(two, SECRET).sound
    alone = make_trainer(model, recipe, World(), two)
    tensors = alone.tensors_to_fill(state.record.extra)
    alone.restore_extra(load_state(state, tensors), tensors)
    alone.export(tmp_path / "resharded")
    assert largest_difference(weights_of(tmp_path / "resharded"), weights_of(two / str(STEPS))) == 0


def test_ranks_that_compute_in_bfloat16_score_canaries_in_float32(tmp_path: Path) -> None:
    model, out = tmp_path / "model", tmp_path / "out"
    write_random_model(model)
    out.mkdir()
    run_two_ranks("compute_in_bfloat16", model, out)
    gaps = json.loads((out / "gaps.json").read_text())
    assert len(gaps) == 3, "before, and after each update"
    for gap in gaps:
        assert gap["pass"] > 1e-3, "the passes are in bfloat16"
        assert gap["canary"] < 1e-5
