"""Learning of the whole train step: every combination of advantage and loss raises the reward of a bandit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.types import Batch, Int32Array, Segment

from ...kit.made_batches import VOCAB, batch_of, trajectory, write_random_model

PROMPT = 2
TOKENS = 2
LIKED = 8
"""The reward is the share of response tokens below this id."""


def sample(
    trainer: PolicyTrainer, contexts: list[Int32Array], rng: np.random.Generator
) -> tuple[Int32Array, np.ndarray]:
    """Sample one token per context from the policy's own distribution, through its public scoring: (ids, logprobs)."""
    distinct, which = np.unique(np.stack(contexts), axis=0, return_inverse=True)
    tails = [np.append(c, v).astype(np.int32) for c in distinct for v in range(VOCAB)]
    table = np.array([x[-1] for x in trainer.logprobs(tails)]).reshape(len(distinct), VOCAB)[which.reshape(-1)]
    noise = rng.gumbel(size=table.shape)
    ids = (table + noise).argmax(1).astype(np.int32)
    return ids, table[np.arange(len(contexts)), ids]


def roll_out(trainer: PolicyTrainer, groups: int, members: int, rng: np.random.Generator) -> Batch:
    prompts = [t.prompt.token_ids for t in (trajectory(f"g{g}.0", [], prompt=PROMPT) for g in range(groups))]
    contexts = [prompts[g] for g in range(groups) for _ in range(members)]
    tokens, logprobs = [], []
    for _ in range(TOKENS):
        ids, values = sample(trainer, contexts, rng)
        contexts = [np.append(c, i).astype(np.int32) for c, i in zip(contexts, ids, strict=True)]
        tokens.append(ids)
        logprobs.append(values)
    built = []
    for g in range(groups):
        group = []
        for m in range(members):
            row = g * members + m
            response = np.array([t[row] for t in tokens], np.int32)
            segment = Segment(
                token_ids=response,
                behavior_logprobs=np.array([x[row] for x in logprobs], np.float32),
                policy_version=trainer.train_step,
                kv_min_version=trainer.train_step,
            )
            group.append(trajectory(f"g{g}.{m}", [segment], float((response < LIKED).mean()), prompt=PROMPT))
        built.append(group)
    return batch_of(*built, train_step=trainer.train_step + 1)


@pytest.mark.parametrize(("advantage", "loss"), [("grpo", "ppo_clip"), ("rloo", "cispo"), ("dr_grpo", "gspo")])
def test_reward_rises_on_a_bandit(tmp_path: Path, advantage: str, loss: str) -> None:
    rng = np.random.default_rng(0)
    algorithm = AlgorithmConfig(advantage=advantage, loss=loss)
    write_random_model(tmp_path, "qwen2", seed=0)
    trainer = PolicyTrainer(tmp_path, TrainerConfig(learning_rate=2e-2, algorithm=algorithm))
    rewards = []
    for _ in range(12):
        report = trainer.train(roll_out(trainer, 4, 8, rng), {v: v for v in range(20)})
        assert report.policy.ratio.max == pytest.approx(1, abs=1e-4)
        rewards.append(report.batch.reward_mean)
    assert np.mean(rewards[:2]) < 0.4 and np.mean(rewards[-2:]) > 0.8
