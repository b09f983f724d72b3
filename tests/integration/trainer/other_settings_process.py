"""One rank under torchrun's environment: trains a batch by the orders of rank 0, its first groups ahead of it.

The other rank reads the run file with a changed field, as the pod that a rolling upgrade replaced first. Rank 0 writes
the report and Adam's first moments.

Usage, in the repository root: python -m tests.integration.trainer.other_settings_process RUN.yaml OUT_FOLDER
FIELD=VALUE GROUPS_AHEAD
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.config import RunConfig, load_run_config
from rollmesh.trainer.learner.distributed import leave_world, local_rank
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.main import build_ranks
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.types import PolicyRecord

from ...kit.made_batches import batch_of, policy_segment, trajectory
from .parts_rank_process import first_moments

BUDGET, OTHER_BUDGET = 70, 80
"""Budgets that split the lengths into as many micro-batches, one of them with the trajectories of another."""
LENGTHS = (30, 56, 30, 58, 32, 60, 28, 26)
PROMPT = 4
_NOISE = np.random.default_rng(5)
BATCH = batch_of(
    *(
        [
            trajectory(f"g{g}.{m}", [policy_segment(_NOISE, LENGTHS[4 * g + m] - PROMPT)], float(m % 2), prompt=PROMPT)
            for m in range(4)
        ]
        for g in range(2)
    )
)


def ranks_of(config: RunConfig) -> RankCoordinator:
    ranks = build_ranks(config, open_checkpoints(config))
    if ranks.world.leads:
        ranks.catalog.update([PolicyRecord(policy_version=0, train_step=0, path="0", manifest_digest="")])
    return ranks


def train(ranks: RankCoordinator, ahead: int = 0) -> StepReport:
    """Train the batch, its first groups ahead of it."""
    settings = ranks.trainer.settings(1)
    if ahead:
        ranks.accumulate(BATCH.groups[:ahead])
    return ranks.train(BATCH, settings)


def main(run_file: Path, out: Path, change: str, ahead: int) -> None:
    torch.set_num_threads(1)
    config = load_run_config(run_file, [change] if local_rank() else [], environ={})
    ranks = ranks_of(config)
    if ranks.world.leads:
        report = train(ranks, ahead)
        ranks.dismiss()
        (out / "report.json").write_text(json.dumps(report.to_json()))
    else:
        ranks.follow()
    moments = first_moments(ranks.trainer)
    if ranks.world.leads:
        save_file(moments, out / "moments.safetensors")
    leave_world()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4]))
