"""One rank under torchrun's environment: trains the batches of the FSDP2 tests and writes what came out.

Usage, in the repository root: python -m tests.integration.trainer.rank_process MODEL_FOLDER OUT_FOLDER RECIPE
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rollmesh.checkpoints.states import load_state, save_state
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.distributed import World, broadcast_bytes, join_world, leave_world
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ...kit.made_batches import random_batch

STEPS = 3
VERSIONS = {v: v for v in range(8)}
SECRET = b"secret"
RECIPES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # Snapshot and the KL reference load further sharded models.
        "snapshot": {"old_logprobs": "snapshot", "kl_coefficient": 0.05, "kl_reference_version": 0},
        "loglinear_ess": {"old_logprobs": "loglinear", "update_scale": "ess"},
        # The average is sharded as the policy is.
        "ewma": {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}},
        "recompute_m2po": {"old_logprobs": "recompute", "masks": ("m2po",)},
        # Snapshots and the reference are scored in the policy's own shards.
        "adapter_snapshot": {"old_logprobs": "snapshot", "kl_coefficient": 0.05, "kl_reference_version": 0},
        "adapter_ewma": {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}},
    }
)
ADAPTER = AdapterConfig(rank=4, alpha=8)


def make_trainer(folder: Path, recipe: str, world: World, versions: Path) -> PolicyTrainer:
    """A float64 trainer with small micro-batches and two minibatches; version 0 is ``folder``."""
    algorithm = AlgorithmConfig(**RECIPES[recipe])
    config = TrainerConfig(
        learning_rate=1e-2,
        minibatches=2,
        max_grad_norm=0.3,
        weight_decay=0.1,
        tokens_per_microbatch=48,
        gradient_checkpointing=True,
        algorithm=algorithm,
    )
    return PolicyTrainer.from_folder(
        folder,
        config,
        dtype="float64",
        adapter=ADAPTER if recipe.startswith("adapter") else None,
        world=world,
        compute_dtype=torch.float64,
        policy_folder=lambda version: folder if version == 0 else versions / str(version),
    )


def run(trainer: PolicyTrainer, out: Path) -> list[object]:
    """Train, exporting every version; returns the reports."""
    reports: list[object] = []
    for step in range(1, STEPS + 1):
        # Five trajectories make an odd number of micro-batches, so that one rank gets a dummy.
        batch = random_batch(step, groups=5, members=1 + 2 * (step % 2), train_step=step, versions=3)
        reports.append(trainer.train(batch, VERSIONS).to_json())
        trainer.export(out / str(step))
    return reports


def main(model: Path, out: Path, recipe: str) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    text = broadcast_bytes(recipe.encode() if world.leads else None, world).decode()
    trainer = make_trainer(model, text, world, out)
    reports = run(trainer, out)
    state = save_state(
        out,
        SECRET,
        session="s",
        train_step=STEPS,
        rollback_count=0,
        tensors=trainer.state_tensors(),
        extra=trainer.state_extra(),
    )
    fresh = make_trainer(model, text, world, out)
    tensors = fresh.tensors_to_fill(state.record.extra)
    fresh.restore_extra(load_state(state, tensors), tensors)
    fresh.train(random_batch(9, groups=5, train_step=STEPS + 1), VERSIONS)
    fresh.export(out / "continued")
    if world.leads:
        (out / "reports.json").write_text(json.dumps(reports))
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
