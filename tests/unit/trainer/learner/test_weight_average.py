"""The old-logprob source ewma: its average, its resets, and a state that continues it bit by bit."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.types import Batch

from ....kit.made_batches import batch_of, policy_segment, random_batch, trajectory
from .conftest import VERSIONS, ModelMaker, make_trainer, response_scores


def make(folder: Path, reset_below: float = 0.0, **algorithm: Any) -> PolicyTrainer:
    options = {"old_logprobs": "ewma", "old_logprobs_options": {"window": 3, "reset_below": reset_below}}
    return make_trainer(folder, learning_rate=3e-2, algorithm={"loss": "decoupled_ppo", **options, **algorithm})


def batch(step: int) -> Batch:
    return random_batch(step, train_step=step, versions=min(2, step))


def weights(trainer: PolicyTrainer, folder: Path) -> dict[str, torch.Tensor]:
    trainer.export(folder)
    return {name: value.double() for name, value in load_file(folder / "model.safetensors").items()}


def average(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    found = {n: t.clone() for n, t in trainer.state_tensors().items() if n.startswith("ewma.")}
    return {name.removeprefix("ewma."): tensor for name, tensor in found.items()}


def test_the_average_is_that_of_the_formula(make_model: ModelMaker, tmp_path: Path) -> None:
    trainer = make(make_model("qwen2"))
    history = [weights(trainer, tmp_path / "0")]
    for step in range(1, 5):
        trainer.train(batch(step), VERSIONS)
        history.append(weights(trainer, tmp_path / str(step)))
    beta = 3 / 5
    powers = [beta ** (len(history) - 1 - k) for k in range(len(history))]
    for name, found in average(trainer).items():
        expected = sum(p * theta[name] for p, theta in zip(powers, history, strict=True)) / sum(powers)
        assert torch.allclose(found.double(), expected, rtol=0, atol=1e-6), name
        assert not torch.allclose(found.double(), history[-1][name], rtol=0, atol=1e-3), name


def test_ratios_are_one_against_the_first_weights_and_then_against_the_average(
    make_model: ModelMaker, tmp_path: Path
) -> None:
    folder = make_model("qwen2")
    trainer = make(folder)
    first = trainer.train(batch(1), VERSIONS)
    assert (first.policy.ratio.min, first.policy.ratio.max) == (1.0, 1.0)
    trainer.train(batch(2), VERSIONS)
    rng = np.random.default_rng(0)
    members = [trajectory(f"g.{m}", [policy_segment(rng, 7)], float(m)) for m in (0, 1)]
    averaged, current = tmp_path / "average", tmp_path / "current"
    _write(trainer, folder, averaged, average(trainer))
    trainer.export(current)
    report = trainer.train(batch_of(members, train_step=3), VERSIONS)
    now, then = (PolicyScorer.from_folder(folder) for folder in (current, averaged))
    ratios = np.concatenate([np.exp(response_scores(now, m) - response_scores(then, m)) for m in members])
    assert report.policy.ratio.mean == pytest.approx(ratios.mean(), abs=1e-5)
    assert report.policy.ratio.max == pytest.approx(ratios.max(), abs=1e-5)
    assert report.policy.old_logprob_fallbacks == {}


def test_a_share_of_active_tokens_below_the_bound_resets_the_average(make_model: ModelMaker) -> None:
    trainer = make(make_model("qwen2"), reset_below=0.9)
    reports = [trainer.train(batch(step), VERSIONS) for step in range(1, 6)]
    # Large steps leave the clip range of the average, which then begins again.
    assert any(report.average_reset for report in reports) and not reports[0].average_reset
    for before, after in pairwise(reports):
        assert _all_one(after) == before.average_reset


def test_a_cap_that_keeps_the_gradient_does_not_reset_the_average(make_model: ModelMaker) -> None:
    trainer = make(make_model("qwen2"), reset_below=1.0, loss="cispo", clip_high=0.01)
    reports = [trainer.train(batch(step), VERSIONS) for step in range(1, 4)]
    assert reports[-1].policy.ratio.clipped_high > 0.1
    assert not any(report.average_reset for report in reports)


def test_trajectories_that_are_skipped_without_an_advantage_count_as_active(make_model: ModelMaker) -> None:
    rng = np.random.default_rng(0)
    mixed = [trajectory(f"a.{m}", [policy_segment(rng, 8)], float(m)) for m in (0, 1)]
    equal = [trajectory(f"b.{m}", [policy_segment(rng, 100)], 1.0) for m in range(4)]
    for skips in (False, True):
        trainer = make(make_model("qwen2"), reset_below=0.9, skip_zero_advantage=skips)
        reports = [trainer.train(batch_of(mixed, equal, train_step=step), VERSIONS) for step in (1, 2, 3)]
        ratio = reports[-1].policy.ratio
        clipped = ratio.tokens * (ratio.clipped_high + ratio.clipped_low)
        assert 0.1 * 2 * 8 < clipped < 0.1 * (2 * 8 + 4 * 100)
        assert (reports[-1].batch.skipped_trajectories, ratio.tokens) == ((4, 2 * 8) if skips else (0, 2 * 8 + 4 * 100))
        assert not any(report.average_reset for report in reports)


def test_a_rollback_begins_the_average_again(make_model: ModelMaker) -> None:
    trainer = make(make_model("qwen2"))
    for step in (1, 2):
        trainer.train(batch(step), VERSIONS)
    trainer.forget_unfinished()
    assert average(trainer) == {}
    assert _all_one(trainer.train(batch(3), VERSIONS))


def test_a_step_with_another_source_drops_the_average(make_model: ModelMaker) -> None:
    trainer = make(make_model("qwen2"))
    trainer.train(batch(1), VERSIONS)
    settings = trainer.settings(2)
    algorithm = AlgorithmConfig(loss="decoupled_ppo", old_logprobs="recompute")
    other = settings.model_copy(update={"recipe": settings.recipe.model_copy(update={"algorithm": algorithm})})
    trainer.train(batch(2), VERSIONS, other)
    assert average(trainer) == {} and "ewma_weight" not in trainer.state_extra()


def _all_one(report: StepReport) -> bool:
    return report.policy.ratio.min == report.policy.ratio.max == 1.0


def _write(trainer: PolicyTrainer, source: Path, folder: Path, values: dict[str, torch.Tensor]) -> None:
    twin = PolicyTrainer(source, TrainerConfig())
    for name, tensor in twin.state_tensors().items():
        if name.startswith("model."):
            tensor.copy_(values[name.removeprefix("model.")])
    twin.export(folder)
