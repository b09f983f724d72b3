"""The train bench compares like with like."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from benchmarks.models import SMALL
from benchmarks.shared_prefixes import CASES, bounds_of
from benchmarks.train import PaddedTrainer, ragged_batch, write_demo_model
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


def test_the_long_baseline_scores_the_same_tokens(tmp_path: Path) -> None:
    write_demo_model(tmp_path)
    ids = [np.arange(3, 60, dtype=np.int32), np.arange(40, dtype=np.int32)]
    ours = PolicyTrainer(tmp_path, TrainerConfig(tokens_per_microbatch=16), device="cpu").logprobs(ids)
    for mine, theirs in zip(ours, PaddedTrainer(tmp_path).score(ids), strict=True):
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1e-5)


@pytest.mark.parametrize("name", [name for name in CASES if "width" not in name and "words" not in name])
def test_the_passes_compute_no_more_tokens_than_the_bound(tmp_path: Path, name: str) -> None:
    write_demo_model(tmp_path)
    groups = tuple(CASES[name].groups(np.random.default_rng(0)))
    batch = Batch(train_step=1, groups=groups)

    def forward_tokens(share: bool) -> int:
        config = TrainerConfig(tokens_per_microbatch=32_768, share_prefixes=share)
        return PolicyTrainer(tmp_path, config, device="cpu").train(batch, {0: 0}).forward_tokens

    assert forward_tokens(False) / forward_tokens(True) == bounds_of(batch, SMALL)["tokens"]
