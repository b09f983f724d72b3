"""The train bench compares like with like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.train import (
    LONG_BUDGET,
    LONGEST,
    MEDIAN,
    TOKENS,
    PaddedTrainer,
    long_batch,
    ragged_batch,
    sorted_bins,
    write_demo_model,
)
from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

pytestmark = pytest.mark.long


def test_the_padded_baseline_makes_the_same_update(tmp_path: Path) -> None:
    write_demo_model(tmp_path / "model")
    batch = ragged_batch(seed=1, tokens=600)
    padded = PaddedTrainer(tmp_path / "model")
    count = sum(len(g.trajectories) for g in batch.groups)
    padded.step(batch, [list(range(i, min(i + 3, count))) for i in range(0, count, 3)])
    trainer = PolicyTrainer(tmp_path / "model", TrainerConfig(learning_rate=4e-4), device="cpu")
    trainer.train(batch, {0: 0})
    trainer.export(tmp_path / "ours")
    ours = dict(AutoModelForCausalLM.from_pretrained(tmp_path / "ours").named_parameters())
    for name, theirs in padded.model.named_parameters():
        # AdamW's first step moves every weight by the learning rate; only the noise around a gradient of 0 may differ.
        close = (ours[name] - theirs).detach().abs() < 4e-6
        assert close.float().mean() > 0.999, name
    assert sum(p.numel() for p in ours.values()) == trainer.parameter_count


def test_lengths_are_those_the_bench_promises() -> None:
    lengths = np.array([t.response_token_count for g in ragged_batch(seed=0).groups for t in g.trajectories])
    assert TOKENS <= lengths.sum() < TOKENS + 8 * LONGEST
    assert abs(np.median(lengths) - MEDIAN) < 15 and lengths.max() == LONGEST


def test_every_trajectory_of_the_long_rows_exceeds_the_token_budget() -> None:
    (group,) = long_batch(seed=0).groups
    assert min(t.response_token_count for t in group.trajectories) > LONG_BUDGET


def test_the_long_baseline_scores_the_same_tokens(tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    ids = [np.arange(3, 60, dtype=np.int32), np.arange(40, dtype=np.int32)]
    ours = PolicyTrainer(tmp_path, TrainerConfig(tokens_per_microbatch=16), device="cpu").logprobs(ids)
    for mine, theirs in zip(ours, PaddedTrainer(tmp_path).score(ids), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5)


def test_sorted_bins_keep_the_padded_budget() -> None:
    lengths = torch.randint(8, 520, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    bins = sorted_bins(lengths, 2048)
    assert sorted(i for b in bins for i in b) == list(range(60))
    assert all(len(b) * max(lengths[i] for i in b) <= 2048 for b in bins)
