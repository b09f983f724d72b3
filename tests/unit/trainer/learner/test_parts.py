"""Gradients of parts add up to the gradient of the whole batch, or are dropped."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rollmesh.errors import DataError
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch

from ....kit.made_batches import batch_of, forked_groups, random_batch, with_kept_sets, with_teacher
from ....kit.trainer_reference import largest_difference
from .conftest import VERSIONS, ModelMaker, exported, make_trainer

BATCH = random_batch(11, groups=5, train_step=3, versions=3)
BATCH = batch_of(*(list(g.trajectories) for g in BATCH.groups), *forked_groups(3), train_step=3)
BATCH = with_teacher(BATCH, 1, top_k=3)
KEPT = with_kept_sets(BATCH, 1, full=0.5)


def trainer_at_step_two(
    folder: Path, dtype: torch.dtype, *, share_prefixes: bool = True, **algorithm: Any
) -> PolicyTrainer:
    options = {"max_grad_norm": 0.5, "tokens_per_microbatch": 60, "share_prefixes": share_prefixes}
    trainer = make_trainer(folder, exact=dtype == torch.float64, algorithm=algorithm, **options)
    trainer.restore_extra({"train_step": 2})
    for module in trainer._model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            # transformers computes it in float32, where a gradient that is divided later is rounded otherwise.
            module.forward = partial(rms_norm, module)
    return trainer


def rms_norm(module: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], module.weight, module.variance_epsilon)


def first_moments(trainer: PolicyTrainer) -> torch.Tensor:
    state = trainer.state_tensors()
    return torch.cat([state[name].flatten() for name in sorted(state) if name.endswith("exp_avg")])


@pytest.mark.parametrize(("dtype", "most"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize(
    "algorithm",
    [
        {},
        {"aggregation": "sequence_mean_token_mean", "loss": "gspo"},
        {"old_logprobs": "recompute", "loss": "decoupled_ppo"},
        {"kl_coefficient": 0.1, "kl_reference_version": 0},
        {"teacher": {"reverse_kl_coefficient": 1.0, "discount": 0.5, "forward_kl_coefficient": 0.5}},
    ],
)
def test_parts_in_any_order_give_the_step_of_the_whole_batch(
    make_model: ModelMaker, dtype: torch.dtype, most: float, algorithm: dict[str, Any]
) -> None:
    folder, batch = make_model("qwen2"), BATCH if "teacher" in algorithm else KEPT
    whole, parts = (trainer_at_step_two(folder, dtype, share_prefixes=share, **algorithm) for share in (False, True))
    if "kl_coefficient" in algorithm:
        for trainer in (whole, parts):
            trainer._old_logprob_scorer._versions._folder = lambda version: folder
    expected = whole.train(batch, VERSIONS)
    parts.accumulate([batch.groups[3], batch.groups[1]], VERSIONS)
    parts.accumulate([batch.groups[0], batch.groups[5]], VERSIONS)
    assert parts.accumulated_group_ids == {"g0", "g1", "g3", "f0"}
    report = parts.train(batch, VERSIONS)
    assert (expected.groups_before_cut, report.groups_before_cut) == (0, 4)
    assert report.loss == pytest.approx(expected.loss, rel=most, abs=most)
    assert report.grad_norm == pytest.approx(expected.grad_norm, rel=most)
    # The sums over packed sequences are rounded in another order.
    assert report.policy.entropy == pytest.approx(expected.policy.entropy, rel=1e-6)
    assert report.policy.forward_kl == (expected.policy.forward_kl and pytest.approx(expected.policy.forward_kl, 1e-6))
    assert report.policy.old_logprob_fallbacks == expected.policy.old_logprob_fallbacks
    assert parts.accumulated_group_ids == frozenset()
    # Not the weights: Adam divides a gradient near 0 by its size, rounding errors included. And not each tensor: the
    # one of a key's bias is a small difference of large sums.
    ours, theirs = (first_moments(trainer) for trainer in (parts, whole))
    assert float((ours - theirs).norm()) <= most * float(theirs.norm())


def with_other_rewards(batch: Batch) -> Batch:
    first, *others = batch.groups
    members = tuple(replace(t, shaped_reward=1.0 - t.shaped_reward) for t in first.trajectories)
    return replace(batch, groups=(replace(first, trajectories=members), *others))


@pytest.mark.parametrize("change", ["contents", "kept sets", "groups", "settings", "policy", "state"])
def test_a_batch_that_is_not_the_one_of_the_parts_is_computed_whole(
    make_model: ModelMaker, tmp_path: Path, change: str
) -> None:
    folder = make_model("qwen2")
    whole, parts = (trainer_at_step_two(folder, torch.float64) for _ in range(2))
    batches = {"contents": with_other_rewards(BATCH), "groups": replace(BATCH, groups=BATCH.groups[1:])}
    batch = (batches | {"kept sets": KEPT}).get(change, BATCH)
    settings = parts.settings(3)
    if change == "settings":
        settings = settings.model_copy(update={"learning_rate": 2e-2})
    parts.accumulate(BATCH.groups[:2], VERSIONS)
    if change == "policy":
        parts.forget_unfinished()
    if change == "state":
        parts.restore_extra(parts.state_extra())
    assert parts.train(batch, VERSIONS, settings).groups_before_cut == 0
    whole.train(batch, VERSIONS, settings)
    assert largest_difference(exported(parts, tmp_path / "parts"), exported(whole, tmp_path / "whole")) == 0.0


def test_a_part_that_cannot_be_trained_on_drops_the_parts_before_it(make_model: ModelMaker, tmp_path: Path) -> None:
    folder = make_model("qwen2")
    whole, parts = (trainer_at_step_two(folder, torch.float64) for _ in range(2))
    parts.accumulate(BATCH.groups[:2], VERSIONS)
    with pytest.raises(DataError, match="the policy version is unknown"):
        parts.accumulate(BATCH.groups[2:3], {7: 7})
    assert parts.accumulated_group_ids == frozenset()
    assert parts.train(BATCH, VERSIONS).groups_before_cut == 0
    whole.train(BATCH, VERSIONS)
    assert largest_difference(exported(parts, tmp_path / "parts"), exported(whole, tmp_path / "whole")) == 0.0
