"""One train step is exact: it equals a plain reference, however it is split; on-policy ratios are 1."""

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import DataError
from rollmesh.trainer.learner.forward_backward import score_sequences
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Trajectory

from ....kit.made_batches import batch_of, policy_segment, random_batch, trajectory, with_kept_sets
from ....kit.trainer_reference import ReferenceTrainer, largest_difference
from .conftest import VERSIONS, ModelMaker, exported, make_trainer, trained

RATE = 1e-2


def exact_trainer(folder: Path, **options: Any) -> PolicyTrainer:
    algorithm = {"dual_clip": 3.0, **options.pop("algorithm", {})}
    return make_trainer(folder, exact=True, max_grad_norm=0.5, algorithm=algorithm, **options)


def with_own_logprobs(trainer: PolicyTrainer, batch: Batch) -> Batch:
    """The same tokens with the behavior_logprobs that the trainer's present policy gives them."""

    def own(member: Trajectory) -> Trajectory:
        ids = np.concatenate([member.prompt.token_ids, member.response_ids]).astype(np.int32)
        start, segments = len(member.prompt.token_ids) - 1, []
        for s in member.segments:
            values = trainer.logprobs([ids], s.temperature)[0][start : start + len(s)]
            start += len(s)
            segments.append(replace(s, behavior_logprobs=None if s.behavior_logprobs is None else values))
        return replace(member, segments=tuple(segments))

    return batch_of(*[[own(t) for t in g.trajectories] for g in batch.groups], train_step=batch.train_step)


@cache
def on_policy_batch(folder: Path) -> Batch:
    """Ragged groups of two temperatures, with the logprobs of the policy in ``folder``."""
    batch = random_batch(3, members=4)
    cooler = [
        trajectory(f"g9.{m}", [policy_segment(np.random.default_rng(m), 9, temperature=0.7)], float(m)) for m in (0, 1)
    ]
    batch = batch_of(*[list(g.trajectories) for g in batch.groups], cooler)
    return with_own_logprobs(PolicyTrainer(folder, TrainerConfig()), batch)


@dataclass(frozen=True)
class ReferenceRun:
    """Three train steps as the reference computes them: batch, loss and gradient norm of each, and the last weights."""

    steps: list[tuple[Batch, float, float]]
    weights: dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def reference_run(make_model: ModelMaker) -> ReferenceRun:
    reference = ReferenceTrainer(make_model("qwen2"), RATE, 0.5, 3.0)
    first, second, third = [random_batch(step, train_step=step, versions=3) for step in (1, 2, 3)]
    batches = [first, with_kept_sets(second, 2), with_kept_sets(third, 3, full=0.3)]
    steps = [(batch, *reference.step(batch)) for batch in batches]
    return ReferenceRun(steps, dict(reference.model.named_parameters()))


@pytest.mark.parametrize("budget", [16, 60, 4096])
def test_three_steps_equal_the_reference_in_float64(
    make_model: ModelMaker, reference_run: ReferenceRun, tmp_path: Path, budget: int
) -> None:
    trainer = exact_trainer(make_model("qwen2"), tokens_per_microbatch=budget)
    for batch, loss, norm in reference_run.steps:
        report = trainer.train(batch, VERSIONS)
        assert report.loss == pytest.approx(loss, abs=1e-10) and report.grad_norm == pytest.approx(norm, rel=1e-9)
    assert largest_difference(exported(trainer, tmp_path), reference_run.weights) < 1e-10


def test_a_batch_whose_trajectories_exceed_the_token_budget_is_scored_and_trained_without_empty_passes(
    make_model: ModelMaker,
) -> None:
    rng = np.random.default_rng(3)
    batch = batch_of([trajectory(f"g0.{i}", [policy_segment(rng, 60)], reward=i) for i in range(2)])
    members = list(batch.groups[0].trajectories)
    trainer = exact_trainer(make_model("qwen2"), tokens_per_microbatch=16, algorithm={"old_logprobs": "stage_end"})
    assert trainer.end_stage(members, VERSIONS) == len(members)
    for member, values in zip(members, trainer.logprobs([m.response_ids for m in members]), strict=True):
        assert len(values) == member.response_token_count - 1
    assert trainer.train(batch, VERSIONS).microbatches == len(members)


def test_canaries_are_scored_in_float32_however_the_gradient_pass_computes(make_model: ModelMaker) -> None:
    folder = make_model("qwen2")
    ids = [np.arange(2, 40, dtype=np.int32)]
    exact = PolicyTrainer(folder, TrainerConfig()).logprobs(ids)[0]
    halved = PolicyTrainer(folder, TrainerConfig(), device="cpu", mixed_precision=True)
    rough = score_sequences(halved._model, halved._compute, ids, 1.0)[0]
    assert np.abs(rough - exact).max() > 1e-4
    assert np.array_equal(halved.logprobs(ids)[0], exact)


def test_masked_old_segments_change_the_numerator_only(make_model: ModelMaker, tmp_path: Path) -> None:
    folder = make_model("qwen3")
    batch = random_batch(7, train_step=4, versions=4)
    trainer = exact_trainer(folder, max_token_staleness=1)
    trainer.restore_extra({"train_step": 3})
    reference = ReferenceTrainer(folder, RATE, 0.5, 3.0)
    report = trainer.train(batch, VERSIONS)
    loss, _ = reference.step(batch, oldest_version=2)
    assert report.loss == pytest.approx(loss, abs=1e-10)
    assert 0 < report.batch.masked_fraction < 1 and report.batch.trajectory_staleness.max == 1
    assert largest_difference(exported(trainer, tmp_path), dict(reference.model.named_parameters())) < 1e-10


def test_a_step_without_a_token_in_the_loss_is_reported_in_numbers(make_model: ModelMaker) -> None:
    trainer = exact_trainer(make_model("qwen2"), max_token_staleness=0)
    trainer.restore_extra({"train_step": 2})
    report = trainer.train(random_batch(1, train_step=3), dict.fromkeys(VERSIONS, 0))
    assert (report.batch.trained_tokens, report.policy.ratio.tokens, report.policy.ratio.mean) == (0, 0, 1.0)


@pytest.mark.parametrize("name", ["qwen2", "llama"])
@pytest.mark.parametrize("loss", ["ppo_clip", "decoupled_ppo", "tis", "gspo", "cispo"])
def test_on_policy_every_ratio_is_one(make_model: ModelMaker, name: str, loss: str) -> None:
    trainer = make_trainer(make_model(name), learning_rate=1e-3, algorithm={"loss": loss})
    report = trainer.train(on_policy_batch(make_model(name)), {0: 0})
    assert report.policy.ratio.min == pytest.approx(1, abs=1e-4) and report.policy.ratio.max == pytest.approx(
        1, abs=1e-4
    )
    assert report.policy.effective_sample_share == pytest.approx(1, abs=1e-3)
    assert report.policy.kl_behavior_k3 < 1e-6 and report.policy.logprob_gap_pure.max < 1e-4
    assert report.policy.logprob_gap_pure.tokens == report.batch.trained_tokens


def test_minibatches_make_one_update_each_and_only_the_first_is_on_policy(make_model: ModelMaker) -> None:
    trainer = make_trainer(make_model("qwen2"), minibatches=4)
    batch = with_own_logprobs(trainer, random_batch(3, members=4))
    report = trainer.train(batch, {0: 0})
    assert report.updates == 4 and report.policy.ratio.max > 1.01
    first = sum(t.response_token_count for t in batch.groups[0].trajectories)
    assert 0 < report.policy.logprob_gap_pure.tokens <= first and report.policy.logprob_gap_pure.max < 1e-4


def test_gradient_checkpointing_changes_nothing(make_model: ModelMaker, tmp_path: Path) -> None:
    folder, batch = make_model("qwen2"), random_batch(5)
    results = []
    for checkpointing in (False, True):
        trainer = exact_trainer(folder, gradient_checkpointing=checkpointing)
        trainer.train(batch, {0: 0})
        results.append(exported(trainer, tmp_path / str(checkpointing)))
    assert largest_difference(*results) < 1e-14


def test_a_batch_out_of_order_is_refused_and_changes_nothing(make_model: ModelMaker) -> None:
    trainer = exact_trainer(make_model("qwen2"))
    with pytest.raises(DataError, match="batch 2 does not follow train step 0"):
        trainer.train(random_batch(0, train_step=2), VERSIONS)
    assert trainer.train_step == 0


def test_a_replayed_step_gives_the_same_weights_bit_for_bit(make_model: ModelMaker, tmp_path: Path) -> None:
    results = []
    for run in ("first", "again"):
        trainer = exact_trainer(make_model("llama"), minibatches=2)
        results.append(exported(trained(trainer), tmp_path / run))
    assert largest_difference(*results) == 0


def test_the_report_is_plain_json(make_model: ModelMaker) -> None:
    report = exact_trainer(make_model("qwen2")).train(random_batch(2, train_step=1), {0: 0})
    again = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert again["train_step"] == 1 and again["policy"]["ratio_by_staleness"]["0"]["tokens"] > 0
