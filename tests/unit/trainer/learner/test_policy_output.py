"""A copy of the policy has the weights and the scores of its train step while later steps train."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Float32Array

from ....kit.made_batches import VOCAB, random_batch
from .conftest import ModelMaker

ADAPTERS = {"full": None, "adapter": AdapterConfig(rank=4, alpha=8, dropout=0.3)}
VERSIONS = {version: version for version in range(20)}
IDS = [np.random.default_rng(3).integers(0, VOCAB, n).astype(np.int32) for n in (9, 17)]


def make(folder: Path, kind: str = "full", dtype: str = "float32", **fields: object) -> PolicyTrainer:
    config = TrainerConfig.model_validate({"learning_rate": 3e-2, **fields})
    return PolicyTrainer.from_folder(folder, config, adapter=ADAPTERS[kind], dtype=dtype)


def train(trainer: PolicyTrainer, steps: int = 1) -> None:
    for step in range(trainer.train_step + 1, trainer.train_step + 1 + steps):
        trainer.train(random_batch(step, train_step=step), VERSIONS)


def same(left: list[Float32Array], right: list[Float32Array]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("kind", ADAPTERS)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_copy_scores_as_its_train_step_did_while_later_steps_train(
    make_model: ModelMaker, kind: str, checkpointing: bool
) -> None:
    trainer, alone = (make(make_model("qwen2"), kind, gradient_checkpointing=checkpointing) for _ in range(2))
    for policy in (trainer, alone):
        train(policy)
    expected = trainer.logprobs(IDS)
    score = trainer.copy_out().score
    assert score is not None
    with ThreadPoolExecutor(1) as pool:
        scoring = pool.submit(lambda: [score(IDS) for _ in range(20)])
        train(trainer, 5)
        scores = scoring.result()
    train(alone, 5)
    assert all(same(found, expected) for found in [*scores, score(IDS)])
    assert not same(trainer.logprobs(IDS), expected), "the later steps changed the weights"
    assert same(trainer.logprobs(IDS), alone.logprobs(IDS)), "scoring changes nothing in training"


@pytest.mark.parametrize("kind", ADAPTERS)
def test_every_copy_scores_with_its_own_weights(make_model: ModelMaker, kind: str) -> None:
    trainer = make(make_model("llama"), kind)
    for _ in range(3):
        train(trainer)
        score = trainer.copy_out().score
        assert score is not None
        assert same(score(IDS), trainer.logprobs(IDS))


@pytest.mark.parametrize("name", ["qwen2", "llama"], ids=["tied head", "head of its own"])
def test_a_copy_writes_the_weights_that_it_scores(make_model: ModelMaker, tmp_path: Path, name: str) -> None:
    trainer = make(make_model(name))
    train(trainer)
    copied = trainer.copy_out()
    train(trainer)
    copied.write(tmp_path)
    assert copied.score is not None
    assert same(copied.score(IDS), PolicyScorer.from_folder(tmp_path, device="cpu").logprobs(IDS))


def test_only_the_model_in_training_scores_weights_that_are_published_in_another_dtype(make_model: ModelMaker) -> None:
    assert make(make_model("qwen2"), dtype="bfloat16").copy_out().score is None


def test_only_the_model_in_training_scores_the_base_of_an_adapter(make_model: ModelMaker) -> None:
    assert make(make_model("qwen2"), "adapter").copy_out(base=True).score is None
