"""Every old-logprob source yields the log-probabilities it promises, or the sampler's with a count."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rollmesh.checkpoints.batches import StepSettings
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import CheckpointError
from rollmesh.trainer.learner.method_binding import differing_settings
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.token_explanation import TokenExplanation
from rollmesh.types import Batch, Trajectory

from ....kit.made_batches import batch_of, policy_segment, trajectory
from .conftest import ModelMaker, make_trainer, response_scores

VERSIONS = {0: 0, 1: 1, 2: 2}


@dataclass(frozen=True)
class Run:
    """A policy trained for two steps, each version on disk, and a batch that mixes all of them."""

    folders: dict[int, Path]
    batch: Batch

    def trainer(self, source: str, *, kept: tuple[int, ...] = (0, 1, 2), **fields: Any) -> PolicyTrainer:
        algorithm = {"old_logprobs": source, **fields.pop("algorithm", {})}
        found = {version: self.folders[version] for version in kept}
        trainer = make_trainer(self.folders[2], kept=found, algorithm=algorithm, **{"learning_rate": 1e-3, **fields})
        trainer.restore_extra({"train_step": 2})
        return trainer


@pytest.fixture(scope="module")
def run(make_model: ModelMaker, tmp_path_factory: pytest.TempPathFactory) -> Run:
    rng = np.random.default_rng(0)
    trainer = PolicyTrainer(make_model("qwen2"), TrainerConfig(learning_rate=3e-2))
    folders = {}
    for step in (0, 1, 2):
        if step:
            members = [trajectory(f"g{step}.{m}", [policy_segment(rng, 6)], float(m)) for m in (0, 1)]
            trainer.train(batch_of(members, train_step=step), VERSIONS)
        folders[step] = tmp_path_factory.mktemp(f"version{step}")
        trainer.export(folders[step])
    members = [
        trajectory("m.0", [policy_segment(rng, 5, 0), policy_segment(rng, 4, 1), policy_segment(rng, 3, 2)], 1.0),
        trajectory("m.1", [policy_segment(rng, 4, 1, kv_min_version=0), policy_segment(rng, 5, 2)], 0.0),
    ]
    return Run(folders=folders, batch=batch_of(members, train_step=3))


@cache
def scorer(folder: Path) -> PolicyScorer:
    return PolicyScorer.from_folder(folder)


def score(folder: Path, member: Trajectory) -> np.ndarray:
    return response_scores(scorer(folder), member)


def explained(trainer: PolicyTrainer, batch: Batch) -> list[TokenExplanation]:
    return list(trainer.explain(batch, VERSIONS))


def check(run: Run, tokens: list[TokenExplanation], expected: Mapping[tuple[int, bool], int | None]) -> None:
    """``expected`` maps (version, pure) to the version whose weights gave the old logprob, None for the sampler."""
    members = {t.trajectory_id: t for t in run.batch.groups[0].trajectories}
    scores = {(i, v): score(run.folders[v], members[i]) for i in members for v in VERSIONS}
    assert len(tokens) == 21
    for token in tokens:
        by = expected[token.policy_version, token.pure]
        value = token.behavior_logprob if by is None else scores[token.trajectory_id, by][token.position]
        assert token.old_logprob == pytest.approx(float(value), abs=1e-5), token


ALL = [(0, True), (1, True), (1, False), (2, True)]


@pytest.mark.parametrize(
    ("source", "expected", "fallbacks"),
    [
        ("sampler", dict.fromkeys(ALL, None), {}),
        ("current", dict.fromkeys(ALL, 2), {}),
        ("recompute", {**dict.fromkeys(ALL, 2), (1, False): None}, {"mixed_cache": 4}),
        ("snapshot", {(0, True): 0, (1, True): 1, (1, False): None, (2, True): 2}, {"mixed_cache": 4}),
    ],
)
def test_source_gives_the_logprobs_it_promises(
    run: Run, source: str, expected: Mapping[tuple[int, bool], int | None], fallbacks: Mapping[str, int]
) -> None:
    trainer = run.trainer(source)
    check(run, explained(trainer, run.batch), expected)
    assert trainer.train(run.batch, VERSIONS).policy.old_logprob_fallbacks == fallbacks


def test_snapshot_of_a_pruned_version_falls_back_and_is_counted(run: Run) -> None:
    trainer = run.trainer("snapshot", kept=(1, 2))
    check(run, explained(trainer, run.batch), {(0, True): None, (1, True): 1, (1, False): None, (2, True): 2})
    report = trainer.train(run.batch, VERSIONS)
    assert report.policy.old_logprob_fallbacks == {"mixed_cache": 4, "version_not_kept": 5}


def test_stage_end_keeps_what_each_stage_computed(run: Run, tmp_path: Path) -> None:
    rng = np.random.default_rng(4)
    config = TrainerConfig(learning_rate=3e-2, algorithm=AlgorithmConfig(old_logprobs="stage_end"))
    trainer = PolicyTrainer(run.folders[0], config)
    straggler, mixed = run.batch.groups[0].trajectories
    folders = {}
    for stage in (0, 1, 2):
        trainer.export(folders.setdefault(stage, tmp_path / str(stage)))
        if stage == 2:
            break
        partial = replace(straggler, segments=straggler.segments[: stage + 1], finish_reason=None)
        assert trainer.end_stage([partial], VERSIONS) == 1
        assert trainer.end_stage([partial], VERSIONS) == 0, "nothing new to record"
        short = [trajectory(f"s{stage}.{m}", [policy_segment(rng, 6, stage)], float(m)) for m in (0, 1)]
        trainer.train(batch_of(short, train_step=stage + 1), VERSIONS)
    own = Run(folders=folders, batch=batch_of([straggler, mixed], train_step=3))
    check(own, explained(trainer, own.batch), {(0, True): 0, (1, True): 1, (1, False): None, (2, True): 2})
    assert trainer.train(own.batch, VERSIONS).policy.old_logprob_fallbacks == {"mixed_cache": 4}


def test_a_trajectory_that_began_again_is_not_given_the_logprobs_of_its_former_tokens(run: Run) -> None:
    trainer = run.trainer("stage_end")
    trainer.restore_extra({"train_step": 1})
    straggler = run.batch.groups[0].trajectories[0]
    former = replace(straggler, segments=(policy_segment(np.random.default_rng(8), 9, 1),), finish_reason=None)
    assert trainer.end_stage([former], VERSIONS) == 1
    trainer.restore_extra(trainer.state_extra() | {"train_step": 2}, trainer.state_tensors())
    report = trainer.train(run.batch, VERSIONS)
    assert report.policy.old_logprob_fallbacks == {"mixed_cache": 4, "stage_not_recorded": 9}


def test_what_a_stage_recorded_is_forgotten_once_its_trajectory_is_gone(run: Run) -> None:
    trainer = run.trainer("stage_end")
    straggler, mixed = run.batch.groups[0].trajectories
    dropped = replace(straggler, trajectory_id="dropped.0", group_id="dropped")
    assert trainer.end_stage([straggler, mixed, dropped], VERSIONS) == 3
    assert [i for i, _, _ in trainer.state_extra()["stage"]] == ["m.0", "m.1", "dropped.0"]
    assert trainer.end_stage([straggler], VERSIONS, kept=["m.1"]) == 0
    assert [i for i, _, _ in trainer.state_extra()["stage"]] == ["m.0", "m.1"]
    trainer.forget_unfinished()
    assert "stage" not in trainer.state_extra()


def test_a_stage_that_was_not_recorded_falls_back_and_is_counted(run: Run) -> None:
    report = run.trainer("stage_end").train(run.batch, VERSIONS)
    assert report.policy.old_logprob_fallbacks == {"mixed_cache": 4, "stage_not_recorded": 9}


@pytest.mark.parametrize("source", ["current", "recompute", "snapshot"])
def test_several_minibatches_compare_with_the_weights_of_the_steps_beginning(run: Run, source: str) -> None:
    twice = batch_of(
        *[list(g.trajectories) for g in run.batch.groups],
        [replace(t, trajectory_id=f"n.{t.member_index}", group_id="n") for t in run.batch.groups[0].trajectories],
        train_step=3,
    )
    one = run.trainer(source).train(run.batch, VERSIONS)
    two = run.trainer(source, minibatches=2, learning_rate=3e-2).train(twice, VERSIONS)
    assert one.policy.ratio_by_staleness[0].max == pytest.approx(1, abs=1e-4)
    assert two.policy.ratio_by_staleness[0].max > 1.01


def test_kl_to_a_pinned_version_pulls_the_policy_back(run: Run) -> None:
    loose = run.trainer("current")
    tight = run.trainer("current", algorithm={"kl_coefficient": 1.0, "kl_reference_version": 0})
    report = tight.train(run.batch, VERSIONS)
    free = loose.train(run.batch, VERSIONS)
    assert free.policy.kl_reference is None
    assert report.policy.kl_reference is not None and report.policy.kl_reference > 0
    members = run.batch.groups[0].trajectories
    log_p = np.concatenate([score(run.folders[2], t) for t in members]).astype(np.float64)
    log_q = np.concatenate([score(run.folders[0], t) for t in members]).astype(np.float64)
    expected = np.mean(np.exp(log_q - log_p) - 1 - (log_q - log_p))
    assert report.policy.kl_reference == pytest.approx(expected, rel=1e-4)
    assert report.loss - free.loss == pytest.approx(expected, rel=1e-4), "its loss has this direction of the KL"
    differences = [
        float((tight.state_tensors()[n] - loose.state_tensors()[n]).abs().max())
        for n in tight.state_tensors()
        if n.startswith("model.")
    ]
    assert max(differences) > 0 and torch.isfinite(torch.tensor(differences)).all()


OTHER_SETTINGS: dict[str, dict[str, Any]] = {
    "learning_rate": {"learning_rate": 0.5},
    "kl_reference_version": {"algorithm": {"kl_coefficient": 1.0, "kl_reference_version": 1}},
    "loss": {"algorithm": {"loss": "cispo", "dual_clip": None}},
    "clip_low": {"algorithm": {"clip_low": 0.9}},
    "advantage": {"algorithm": {"advantage": "dr_grpo"}},
    "old_logprobs": {"source": "recompute"},
    "aggregation": {"algorithm": {"aggregation": "sequence_mean_token_mean"}},
    "minibatches": {"minibatches": 2},
    "betas": {"betas": (0.5, 0.6)},
    "weight_decay": {"weight_decay": 0.3},
    "max_grad_norm": {"max_grad_norm": 1e-3},
}


@pytest.fixture(scope="module")
def two_groups(run: Run) -> Batch:
    rng = np.random.default_rng(5)
    others = [trajectory(f"n.{m}", [policy_segment(rng, 6, 2)], float(m)) for m in (0, 1)]
    return batch_of(list(run.batch.groups[0].trajectories), others, train_step=3)


@pytest.fixture(scope="module")
def weights_of_defaults(run: Run, two_groups: Batch) -> Mapping[str, torch.Tensor]:
    """State after a step with none of the other settings."""
    trainer = run.trainer("sampler")
    trainer.train(two_groups, VERSIONS)
    return trainer.state_tensors()


@pytest.mark.parametrize("name", OTHER_SETTINGS)
def test_a_step_that_is_trained_again_takes_every_setting_from_its_batch_file(
    run: Run, two_groups: Batch, weights_of_defaults: Mapping[str, torch.Tensor], name: str
) -> None:
    first = run.trainer(**{"source": "sampler", **OTHER_SETTINGS[name]})
    recorded = StepSettings.model_validate_json(first.settings(3).model_dump_json())
    again = run.trainer("sampler")
    assert name in differing_settings(recorded, again.settings(3))
    assert differing_settings(recorded, first.settings(3)) == {}
    first.train(two_groups, VERSIONS)
    again.train(two_groups, VERSIONS, recorded)
    weights = [first.state_tensors(), again.state_tensors(), weights_of_defaults]
    assert all(torch.equal(weights[0][tensor], weights[1][tensor]) for tensor in weights[0])
    assert not all(torch.equal(weights[0][tensor], weights[2][tensor]) for tensor in weights[0])


def test_a_reference_that_is_not_kept_is_an_error_that_names_it(run: Run) -> None:
    trainer = run.trainer("sampler", kept=(1, 2), algorithm={"kl_coefficient": 0.1})
    with pytest.raises(CheckpointError, match="policy_version 0: kl_reference_version is not kept"):
        trainer.train(run.batch, VERSIONS)
    assert trainer.train_step == 2


def test_a_version_that_vanishes_while_it_is_read_falls_back(run: Run, tmp_path: Path) -> None:
    trainer = replace(run, folders={**run.folders, 0: tmp_path / "pruned"}).trainer("snapshot")
    report = trainer.train(run.batch, VERSIONS)
    assert report.policy.old_logprob_fallbacks == {"mixed_cache": 4, "version_not_kept": 5}
