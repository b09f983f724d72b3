"""Generators that answer with other weights than the adapter they name: the audit finds every one, at version 1."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from peft.tuners.lora import LoraLayer

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.manifest import CanarySequence
from rollmesh.checkpoints.policies import BasePolicy, VerifiedPolicy
from rollmesh.config.model import AdapterConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.trainer import TrainerConfig
from rollmesh.generator.canary import CHANGE_NOISE, MIN_CHANGES, Canary, CanaryFailed, CanaryScores
from rollmesh.report.audit_result import GAP_BOUNDS
from rollmesh.report.rescore import gaps_of_version
from rollmesh.trainer.learner.policy_model import PolicyModel
from rollmesh.trainer.learner.policy_scorer import PolicyScorer, load_published
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.publishing import CANARY_SEQUENCES, canary_count, canary_sequences
from rollmesh.types import Trajectory

from ...kit.made_batches import random_batch

CANARY_THRESHOLD = 0.005
"""Of generator.canary_threshold in float32."""
COUNTS = (CANARY_SEQUENCES, canary_count(10**9, "cpu"))
"""Numbers of canary sequences: of most models, and of a large one on a CPU."""
Fault = Callable[[PolicyModel], None]


def adapters(model: PolicyModel) -> list[LoraLayer]:
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def base_answers(model: PolicyModel) -> None:
    for layer in adapters(model):
        layer.enable_adapters(False)


def half_of_the_modules(model: PolicyModel) -> None:
    for layer in adapters(model)[::2]:
        layer.enable_adapters(False)


def scale_without_alpha(model: PolicyModel) -> None:
    for layer in adapters(model):
        layer.scaling["default"] = 1.0


def scale_of_rslora(model: PolicyModel) -> None:
    for layer in adapters(model):
        layer.scaling["default"] *= layer.r["default"] ** 0.5


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[int, VerifiedPolicy]:
    """The demo's base and two adapters above it, each after one step at the demo's rate."""
    torch.set_num_threads(1)
    store = CheckpointStore(tmp_path_factory.mktemp("store"), b"secret")
    folder = tmp_path_factory.mktemp("model") / "model"
    shutil.copytree(resolve_model("recipe:countdown"), folder)
    adapter, config = AdapterConfig(rank=16, alpha=32), TrainerConfig(learning_rate=2e-3, device="cpu")
    trainer, found, base = PolicyTrainer(folder, config, adapter=adapter), {}, None
    for version in range(3):
        if version:
            trainer.train(random_batch(version, train_step=version), {v: v for v in range(3)})
        sequences = canary_sequences(96)
        scores = zip(sequences, trainer.logprobs(sequences), strict=True)
        record = store.publish(
            session="s",
            policy_version=version,
            train_step=version,
            parent=version - 1 if version else None,
            write=trainer.copy_out(base=not version).write,
            canary=[CanarySequence(token_ids=ids.tolist(), logprobs=values.tolist()) for ids, values in scores],
            base=base,
        )
        found[version] = store.open(record)
        base = base or BasePolicy(record=record, manifest=found[0].manifest)
    return found


def answered_by(scorer: PolicyScorer, version: int) -> list[Trajectory]:
    """Trajectories whose segments name ``version``, with the logprobs of the scorer."""
    made = []
    for member in random_batch(7, groups=2, longest=48).groups[0].trajectories:
        segment = replace(member.segments[0], policy_version=version, kv_min_version=version)
        ids = np.concatenate([member.prompt.token_ids, segment.token_ids]).astype(np.int32)
        (values,) = scorer.logprobs([ids])
        sampled = values[len(member.prompt.token_ids) - 1 :].astype(np.float32)
        made.append(replace(member, segments=(replace(segment, behavior_logprobs=sampled),)))
    return made


def faulty(policy: VerifiedPolicy, fault: Fault) -> PolicyScorer:
    scorer = PolicyScorer.from_policy(policy, device="cpu")
    fault(scorer._model)
    return scorer


def over_the_bound(policy: VerifiedPolicy, trajectories: list[Trajectory]) -> int:
    version = policy.manifest.policy_version
    exact = PolicyScorer.from_policy(policy, device="cpu", dtype=torch.float64)
    gaps = gaps_of_version(PolicyScorer.from_policy(policy, device="cpu"), version, trajectories, lambda: exact)
    return gaps.over(GAP_BOUNDS["float32"].token)[0]


def canary_scores(policy: VerifiedPolicy, scorer: PolicyScorer, count: int) -> CanaryScores:
    """The canary's scores of the first sequences."""
    canary = policy.manifest.canary[:count]
    scores = scorer.logprobs([np.array(sequence.token_ids, np.int32) for sequence in canary])
    own = policy.manifest.policy_version
    return CanaryScores(
        policy_version=own,
        engine_logprobs=np.concatenate(scores).astype(np.float64),
        trainer_logprobs=np.concatenate([np.array(sequence.logprobs) for sequence in canary]),
        weights=frozenset({str(own)}),
        is_adapter=own > 0,
    )


def assert_canary_refuses(policies: dict[int, VerifiedPolicy], version: int, scorer: PolicyScorer) -> None:
    """The canary refuses the scores by their distance, and also by their change alone, from the version before."""
    before = PolicyScorer.from_policy(policies[version - 1], device="cpu")
    for count in COUNTS:
        found = canary_scores(policies[version], scorer, count)
        assert found.gap > CANARY_THRESHOLD
        canary = Canary(threshold=np.inf, min_change=MIN_CHANGES["float32"], change_noise=CHANGE_NOISE["float32"])
        canary.check(canary_scores(policies[version - 1], before, count))
        with pytest.raises(CanaryFailed):
            canary.check(found)


@pytest.mark.parametrize("version", [1, 2])
def test_the_named_adapter_passes_canary_and_audit(policies: dict[int, VerifiedPolicy], version: int) -> None:
    policy = policies[version]
    scorer = PolicyScorer.from_policy(policy, device="cpu")
    before = PolicyScorer.from_policy(policies[version - 1], device="cpu")
    for count in COUNTS:
        canary = Canary(CANARY_THRESHOLD, MIN_CHANGES["float32"], CHANGE_NOISE["float32"])
        canary.check(canary_scores(policies[version - 1], before, count))
        canary.check(canary_scores(policy, scorer, count))
    assert over_the_bound(policy, answered_by(scorer, version)) == 0
    assert load_published(policy, dtype=torch.float32, device=torch.device("cpu")).adapter is not None


@pytest.mark.parametrize("fault", [base_answers, half_of_the_modules, scale_without_alpha, scale_of_rslora])
def test_other_weights_than_the_named_adapter_fail_canary_and_audit(
    policies: dict[int, VerifiedPolicy], fault: Fault
) -> None:
    scorer = faulty(policies[1], fault)
    assert_canary_refuses(policies, 1, scorer)
    assert over_the_bound(policies[1], answered_by(scorer, 1)) > 0


def test_the_adapter_of_the_version_before_fails_canary_and_audit(policies: dict[int, VerifiedPolicy]) -> None:
    scorer = PolicyScorer.from_policy(policies[1], device="cpu")
    assert_canary_refuses(policies, 2, scorer)
    assert over_the_bound(policies[2], answered_by(scorer, 2)) > 0
