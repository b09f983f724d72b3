"""One rank under torchrun's environment: trains a batch in parts, and writes the report and Adam's first moments.

Usage, in the repository root: python -m tests.integration.trainer.parts_rank_process MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rollmesh.config.trainer import TrainerConfig
from rollmesh.trainer.learner.distributed import World, join_world, leave_world
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer

from ...kit.made_batches import random_batch

BATCH = random_batch(11, groups=5, train_step=3, versions=3)
VERSIONS = {v: v for v in range(8)}


def trainer_at_step_two(folder: Path, world: World) -> PolicyTrainer:
    config = TrainerConfig(learning_rate=1e-2, max_grad_norm=0.5, tokens_per_microbatch=60)
    trainer = PolicyTrainer.from_folder(folder, config, dtype="float32", world=world, compute_dtype=torch.float32)
    trainer.restore_extra({"train_step": 2})
    return trainer


def first_moments(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in sorted(trainer.state_tensors().items()) if name.endswith("exp_avg")}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    trainer = trainer_at_step_two(model, world)
    trainer.accumulate([BATCH.groups[3], BATCH.groups[1]], VERSIONS)
    trainer.accumulate([BATCH.groups[0]], VERSIONS)
    report = trainer.train(BATCH, VERSIONS).to_json()
    moments = first_moments(trainer)
    if world.leads:
        (out / "report.json").write_text(json.dumps(report))
        save_file(moments, out / "moments.safetensors")
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
