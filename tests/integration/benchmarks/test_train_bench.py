"""The train bench compares like with like, and the arms of the GPU bench do the same work, on a CPU at tiny size."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import gpu
from benchmarks.gpu_arm import Update
from benchmarks.models import SMALL
from benchmarks.shared_prefixes import CASES, bounds_of
from benchmarks.train import PaddedTrainer, ragged_batch, write_demo_model
from rollmesh.config.trainer import TrainerConfig
from rollmesh.errors import ConfigError
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


PLAN = gpu.quick_plan()
SYNC, COPRIS = "sync", "copris_paper 32"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results file of a quick bench."""
    folder: Path = tmp_path_factory.mktemp("gpu")
    rows = gpu.run(quick=True, updates=2, output=folder)
    document: dict[str, Any] = json.loads((folder / gpu.RESULTS).read_text())
    assert document["measures"] == [row.figures() for row in rows]
    return document


@pytest.fixture(scope="module")
def arms(saved: dict[str, Any]) -> dict[str, list[Update]]:
    """Measured updates of every arm."""
    found = defaultdict(list)
    for fields in saved["updates"]:
        found[fields["arm"]].append(Update(**fields))
    return found


def test_arms_take_turns_and_train_equally_many_trajectories_of_the_forced_lengths(saved, arms):
    assert [u["arm"] for u in saved["updates"]] == [SYNC, COPRIS] * 2
    assert [u.train_step for u in (*arms[SYNC], *arms[COPRIS])] == [2, 3, 3, 4]
    for update in (u for updates in arms.values() for u in updates):
        assert len(update.lengths) == PLAN.workload.batch_size
        for trajectory_id, length in update.lengths.items():
            group, member = map(int, trajectory_id.split("."))
            assert length == PLAN.workload.group(group)[member].length


def test_sync_trains_the_stream_in_order_and_leaves_nothing(arms):
    groups = [sorted({int(i.split(".")[0]) for i in u.lengths}) for u in arms[SYNC]]
    assert groups == [[4, 5, 6, 7], [8, 9, 10, 11]]
    for update in arms[SYNC]:
        assert update.untrained_tokens == update.reprefilled_tokens == 0
        assert (update.trained_tokens, update.most_running) == (update.generated_tokens, 16)


def test_copris_fills_its_pool_and_continues_what_it_interrupted(arms):
    first, second = arms[COPRIS]
    assert max(first.most_running, second.most_running) == 32
    assert first.untrained_tokens > 0
    assert first.reprefilled_tokens + second.reprefilled_tokens > 0
    assert second.generated_tokens + first.untrained_tokens == second.trained_tokens + second.untrained_tokens


def test_without_a_gpu_it_refuses_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="no CUDA.*--quick"):
        gpu.run()
