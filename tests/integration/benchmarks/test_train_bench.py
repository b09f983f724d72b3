"""The train bench compares like with like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks.models import SMALL
from benchmarks.shared_prefixes import CASES, bounds_of
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
from rollmesh.types import Batch

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


def test_the_bounds_of_shared_prefixes_are_those_of_counting() -> None:
    groups = CASES["single sequences of 124"].groups(np.random.default_rng(0))
    # Some random prompts begin with the same words by chance, here and below.
    single = bounds_of(Batch(train_step=1, groups=tuple(groups)), SMALL)
    assert single == pytest.approx({"tokens": 1, "multiplications": 1}, abs=3e-3)
    (group,) = CASES["prompts of 512, answers of 512"].groups(np.random.default_rng(0))
    bounds = bounds_of(Batch(train_step=1, groups=(group,)), SMALL)
    # 8 of 1,023 tokens are a prompt of 512 and 8 of 511.
    assert bounds["tokens"] == pytest.approx(8 * 1023 / (512 + 8 * 511), rel=1e-3)
    # In a layer a token costs 79,872 multiplications, and 192 for each token that it reads; an answer's head 9,216.
    alone = 3 * (8184 * 79_872 + 8 * 1023 * 512 * 192) + 4096 * 9_216
    shared = 3 * (4600 * 79_872 + (512 * 513 // 2 + 8 * (1023 * 512 - 512 * 513 // 2)) * 192) + 4096 * 9_216
    assert bounds["multiplications"] == pytest.approx(alone / shared, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in CASES if "width" not in name and "words" not in name])
def test_the_passes_compute_no_more_tokens_than_the_bound(tmp_path: Path, name: str) -> None:
    write_demo_model(tmp_path)
    groups = tuple(CASES[name].groups(np.random.default_rng(0)))
    batch = Batch(train_step=1, groups=groups)

    def forward_tokens(share: bool) -> int:
        config = TrainerConfig(tokens_per_microbatch=32_768, share_prefixes=share)
        return PolicyTrainer(tmp_path, config, device="cpu").train(batch, {0: 0}).forward_tokens

    assert forward_tokens(False) / forward_tokens(True) == bounds_of(batch, SMALL)["tokens"]
