"""One rank of a gang that computes in bfloat16, as on CUDA, but over gloo: its scores beside the exported weights.

Usage, in the repository root: python -m tests.integration.trainer.mixed_precision_process MODEL_FOLDER OUT_FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch

from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.trainer.learner.distributed import join_world, leave_world
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.service.publishing import canary_sequences

from ...kit.made_batches import VOCAB, random_batch

STEPS = 2
VERSIONS = {v: v for v in range(STEPS + 1)}


def main(model: Path, out: Path) -> None:
    torch.set_num_threads(1)
    world = join_world("cpu")
    config = TrainerConfig(learning_rate=1e-2, algorithm=AlgorithmConfig(old_logprobs="current"))
    trainer = PolicyTrainer.from_folder(model, config, world=world, mixed_precision=True)
    canary = canary_sequences(VOCAB)
    found = []
    for step in range(STEPS + 1):
        batch = random_batch(step, train_step=step + 1)
        trainer.export(out / str(step))
        scores = trainer.logprobs(canary, 0.7)
        trained = {(t.trajectory_id, t.position): t.logprob for t in trainer.explain(batch, VERSIONS)}
        if world.leads:
            alone = PolicyScorer.from_folder(out / str(step), device="cpu")
            canary_gap = np.abs(np.concatenate(scores) - np.concatenate(alone.logprobs(canary, 0.7))).max()
            other = PolicyTrainer.from_folder(out / str(step), config, mixed_precision=False)
            other.restore_extra({"train_step": step})
            exact = {(t.trajectory_id, t.position): t.logprob for t in other.explain(batch, VERSIONS)}
            pass_gap = max(abs(exact[token] - value) for token, value in trained.items())
            found.append({"canary": float(canary_gap), "pass": float(pass_gap)})
        if step < STEPS:
            trainer.train(batch, VERSIONS)
    if world.leads:
        (out / "gaps.json").write_text(json.dumps(found))
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
