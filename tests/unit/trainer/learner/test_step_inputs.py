"""Advantages that need a pass, and masks, in a real train step of a small model."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.trainer.learner.packing import MicroBatch
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.token_scores import TopTokens
from rollmesh.types import Batch

from ....kit.made_batches import random_batch
from ....kit.trainer_reference import largest_difference, weights_of
from .conftest import VERSIONS, ModelMaker, make_trainer


def trainer_of(folder: Path, reference: Path | None = None, *, minibatches: int = 1, **algorithm: Any) -> PolicyTrainer:
    """A float64 trainer of the policy in ``folder``; version 0 is kept in ``reference``."""
    kept = {} if reference is None else {0: reference}
    return make_trainer(folder, exact=True, kept=kept, minibatches=minibatches, algorithm=algorithm)


def advantages(trainer: PolicyTrainer, batch: Batch) -> dict[str, float]:
    """The advantage of every trajectory, as ``explain`` shows it."""
    tokens = trainer.explain(batch, VERSIONS)
    return {token.trajectory_id: token.advantage for token in tokens if token.policy_version is not None}


def sums(folder: Path, batch: Batch) -> dict[str, tuple[float, int]]:
    """Sum of the log-probabilities of the policy in ``folder`` over the policy tokens, and their number."""
    trainer, found = trainer_of(folder), {}
    for member in (t for g in batch.groups for t in g.trajectories):
        ids = np.concatenate([member.prompt.token_ids, member.response_ids]).astype(np.int32)
        position, total, count = len(member.prompt.token_ids) - 1, 0.0, 0
        for segment in member.segments:
            if segment.behavior_logprobs is not None:
                values = trainer.logprobs([ids], segment.temperature)[0]
                total += float(values[position : position + len(segment)].astype(np.float64).sum())
                count += len(segment)
            position += len(segment)
        found[member.trajectory_id] = (total, count)
    return found


def test_tba_reads_the_policy_and_its_reference_over_whole_answers(make_model: ModelMaker) -> None:
    folder, other = make_model("qwen2"), make_model("qwen2", seed=1)
    batch, beta = random_batch(0, groups=3, members=3), 0.5
    policy, reference = sums(folder, batch), sums(other, batch)
    got = advantages(trainer_of(folder, other, advantage="tba", advantage_options={"beta": beta}), batch)
    for group in batch.groups:
        energy = {
            t.trajectory_id: t.shaped_reward - beta * (policy[t.trajectory_id][0] - reference[t.trajectory_id][0])
            for t in group.trajectories
        }
        for trajectory_id, value in energy.items():
            assert got[trajectory_id] == pytest.approx(value - sum(energy.values()) / 3, abs=1e-4)


def test_drpo_weighs_wrong_answers_by_their_probability_under_the_policy(make_model: ModelMaker) -> None:
    folder = make_model("qwen2")
    batch = random_batch(0, groups=4, members=4)
    policy = sums(folder, batch)
    options = {"longest_tokens": 30, "tau": 0.1}
    got = advantages(trainer_of(folder, advantage="drpo", advantage_options=options), batch)
    mixed = 0
    for group in batch.groups:
        wrong = [t.trajectory_id for t in group.trajectories if t.shaped_reward == 0]
        if not 0 < len(wrong) < 4:
            assert all(got[t.trajectory_id] == 0 for t in group.trajectories)
            continue
        mixed += 1
        likely = {i: np.exp(policy[i][0] / policy[i][1] / 0.1) for i in wrong}
        for trajectory_id, value in likely.items():
            assert got[trajectory_id] == pytest.approx(-4 * value / sum(likely.values()), abs=1e-4)
        assert sum(got[t.trajectory_id] for t in group.trajectories) == pytest.approx(0, abs=1e-9)
    assert mixed > 0


def test_masked_tokens_leave_the_numerator_only_and_are_counted_by_mask(make_model: ModelMaker) -> None:
    folder, batch = make_model("qwen2"), random_batch(2, groups=4, members=4)
    masks = (
        {"name": "icepop", "options": {"low": 0.9, "high": 1.2}},
        {"name": "mastered", "options": {"entropy": 10, "probability": 0.02}},
    )
    solved = {t.trajectory_id for g in batch.groups for t in g.trajectories if t.shaped_reward > 0}
    explained = list(trainer_of(folder, old_logprobs="current", masks=masks).explain(batch, VERSIONS))
    written = [token for token in explained if token.policy_version is not None]
    for token in written:
        outside = not 0.9 <= np.exp(token.logprob - token.behavior_logprob) <= 1.2
        mastered = not outside and token.trajectory_id in solved and np.exp(token.logprob) >= 0.02
        assert (token.reason == "icepop") == outside and (token.reason == "mastered") == mastered
    kept = sum(token.advantage for token in written if token.reason not in ("icepop", "mastered"))
    report = trainer_of(folder, old_logprobs="current", masks=masks).train(batch, VERSIONS)
    assert report.loss == pytest.approx(-kept / len(written), abs=1e-9)
    counts = report.batch.masked_tokens
    assert 0 < counts["icepop"] < len(written) and counts["mastered"] > 0
    assert sum(counts.values()) == len(written) - report.batch.trained_tokens
    assert report.policy.ratio.max == pytest.approx(1, abs=1e-9) and report.policy.ratio.min == pytest.approx(
        1, abs=1e-9
    )


def test_loglinear_interpolates_with_the_policy_of_the_gradient_pass(
    make_model: ModelMaker,
) -> None:
    batch = random_batch(4, train_step=4, versions=4)
    trainer = trainer_of(make_model("qwen2"), old_logprobs="loglinear")
    trainer.train_step = 3
    ages = set()
    for token in trainer.explain(batch, VERSIONS):
        if token.policy_version is not None:
            share = token.staleness / (token.staleness + 1)
            expected = share * token.logprob + (1 - share) * token.behavior_logprob
            assert token.old_logprob == pytest.approx(expected, abs=1e-9)
            assert token.ratio == pytest.approx(np.exp(token.logprob - expected), rel=1e-6)
            ages.add(token.staleness)
    assert len(ages) > 1
    report = trainer.train(batch, VERSIONS)
    assert report.updates == 1 and report.policy.old_logprob_fallbacks == {}


@pytest.mark.parametrize(("source", "passes"), [("sampler", 2), ("loglinear", 2), ("recompute", 3)])
def test_loglinear_needs_no_pass_beside_those_of_the_two_minibatches(
    make_model: ModelMaker, monkeypatch: pytest.MonkeyPatch, source: str, passes: int
) -> None:
    score, micros = PolicyModel.score, []

    def counted(
        model: PolicyModel, micro: MicroBatch, *, entropy: bool, top: TopTokens | None = None
    ) -> tuple[torch.Tensor, ...]:
        micros.append(micro)
        return score(model, micro, entropy=entropy, top=top)

    monkeypatch.setattr(PolicyModel, "score", counted)
    trainer = trainer_of(make_model("qwen2"), minibatches=2, old_logprobs=source)
    trainer.train_step = 3
    assert trainer.train(random_batch(4, train_step=4, versions=4), VERSIONS).updates == 2
    assert len(micros) == passes


@pytest.mark.parametrize("minibatches", [1, 2])
def test_trajectories_without_advantage_need_no_pass_and_stay_in_the_denominators(
    make_model: ModelMaker, tmp_path: Path, minibatches: int
) -> None:
    folder, batch = make_model("qwen2"), random_batch(0, groups=4, members=4)
    for name in ("all", "some"):
        trainer = trainer_of(
            folder,
            minibatches=minibatches,
            advantage="pairs",
            advantage_options={"kept": 0.5},
            old_logprobs="recompute",
            skip_zero_advantage=name == "some",
        )
        report = trainer.train(batch, VERSIONS)
        trainer.export(tmp_path / name)
        if name == "all":
            everything = report
    assert report.batch.skipped_trajectories >= 8 and everything.batch.skipped_trajectories == 0
    assert report.forward_tokens < everything.forward_tokens
    assert report.batch.original_tokens == everything.batch.original_tokens
    assert report.loss == pytest.approx(everything.loss, abs=1e-12)
    assert report.grad_norm == pytest.approx(everything.grad_norm, rel=1e-9)
    assert largest_difference(weights_of(tmp_path / "all"), weights_of(tmp_path / "some")) < 1e-9


@pytest.mark.parametrize(
    "algorithm",
    [
        {"kl_coefficient": 0.1},
        {"loss": "kimi"},
        {"update_scale": "ess"},
        {"masks": ("icepop", "m2po"), "old_logprobs": "current"},
        {"masks": ("own_mask:everything",)},
    ],
)
def test_no_trajectory_is_skipped_where_something_else_needs_its_gradient(
    make_model: ModelMaker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, algorithm: dict[str, Any]
) -> None:
    (tmp_path / "own_mask.py").write_text("def everything(data):\n    return data.mask\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_mask", raising=False)
    folder, batch = make_model("qwen2"), random_batch(0, groups=2, members=4)
    reports = [
        trainer_of(folder, folder, advantage="pairs", skip_zero_advantage=skip, **algorithm).train(batch, VERSIONS)
        for skip in (False, True)
    ]
    everything, report = reports
    assert report.batch.skipped_trajectories == 0
    assert report.batch.masked_tokens == everything.batch.masked_tokens
    assert report.rate_factor == everything.rate_factor and report.grad_norm == everything.grad_norm


def test_a_mask_that_reads_single_answers_allows_trajectories_without_a_pass(make_model: ModelMaker) -> None:
    folder, batch = make_model("qwen2"), random_batch(0, groups=2, members=4)
    shared: dict[str, Any] = {"advantage": "pairs", "masks": ("icepop",), "old_logprobs": "current"}
    everything = trainer_of(folder, **shared).train(batch, VERSIONS)
    report = trainer_of(folder, skip_zero_advantage=True, **shared).train(batch, VERSIONS)
    assert report.batch.skipped_trajectories > 0 and report.batch.masked_tokens["icepop"] > 0
    assert report.loss == pytest.approx(everything.loss, abs=1e-12)
    assert report.grad_norm == pytest.approx(everything.grad_norm, rel=1e-9)


def test_trajectories_without_a_pass_are_explained_with_their_old_logprobs(make_model: ModelMaker) -> None:
    trainer = trainer_of(make_model("qwen2"), advantage="pairs", old_logprobs="current", skip_zero_advantage=True)
    batch = random_batch(0, groups=4, members=4)
    written = [token for token in trainer.explain(batch, VERSIONS) if token.policy_version is not None]
    assert any(token.reason == "zero_advantage" for token in written)
    assert all(token.old_logprob == token.logprob and not token.old_logprob_fallback for token in written)
    assert trainer.train(batch, VERSIONS).batch.skipped_trajectories > 0


def test_a_batch_without_any_advantage_is_passed_whole(make_model: ModelMaker) -> None:
    batch = random_batch(0, groups=2, members=3)
    trainer = trainer_of(make_model("qwen2"), advantage="mc_grpo", skip_zero_advantage=True)
    equal = replace(
        batch,
        groups=tuple(
            replace(g, trajectories=tuple(replace(t, shaped_reward=1.0) for t in g.trajectories)) for g in batch.groups
        ),
    )
    report = trainer.train(equal, VERSIONS)
    assert report.batch.skipped_trajectories == 0 and report.grad_norm == 0


def test_a_small_effective_sample_size_lowers_the_rate_of_its_update(make_model: ModelMaker, tmp_path: Path) -> None:
    folder, batch = make_model("qwen2"), random_batch(2)
    plain, scaled = trainer_of(folder), trainer_of(folder, update_scale="ess", update_scale_options={"base": 0.8})
    before, after = plain.train(batch, VERSIONS), scaled.train(batch, VERSIONS)
    share = after.policy.effective_sample_share
    assert 0 < share < 0.8 and before.rate_factor == 1.0
    assert after.rate_factor == pytest.approx((share / 0.8) ** 0.5, rel=1e-9)
    plain.export(tmp_path / "plain")
    scaled.export(tmp_path / "scaled")
    start, far, near = (weights_of(place) for place in (folder, tmp_path / "plain", tmp_path / "scaled"))
    moved = largest_difference(start, near) / largest_difference(start, far)
    assert moved == pytest.approx(after.rate_factor, rel=1e-3)
    assert scaled.train(replace(batch, train_step=2), VERSIONS).learning_rate == before.learning_rate
