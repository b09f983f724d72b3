"""One rank under torchrun's environment, in one of the scenes below.

Usage, in the repository root: python -m tests.integration.trainer.rank_process SCENE ARGUMENT...
"""

import errno
import json
import os
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from safetensors.torch import save_file
from torch import distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.tensor import DTensor

from rollmesh.checkpoints import committed, durable, states
from rollmesh.checkpoints.bucket import open_checkpoints
from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.states import load_state, save_state
from rollmesh.config import RunConfig, load_run_config
from rollmesh.config.model import AdapterConfig
from rollmesh.config.trainer import AlgorithmConfig, TrainerConfig
from rollmesh.errors import CheckpointError, Reason
from rollmesh.trainer.learner.distributed import (
    World,
    broadcast_bytes,
    join_world,
    leave_world,
    local_rank,
    sum_over_ranks,
)
from rollmesh.trainer.learner.policy_scorer import PolicyScorer
from rollmesh.trainer.learner.policy_trainer import PolicyTrainer
from rollmesh.trainer.learner.step_report import StepReport
from rollmesh.trainer.main import build_ranks
from rollmesh.trainer.service.policy_catalog import PolicyCatalog
from rollmesh.trainer.service.publishing import canary_sequences
from rollmesh.trainer.service.ranks import RankCoordinator
from rollmesh.types import Batch, PolicyRecord

from ...kit.checkpoint_samples import step_settings
from ...kit.made_batches import (
    VOCAB,
    batch_of,
    forked_groups,
    policy_segment,
    random_batch,
    trajectory,
    with_kept_sets,
    with_teacher,
)
from ...kit.records import policy_record

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
        # Beginnings are shared, and a rank has a dummy without a token beside the top tokens of another one.
        "taught": {"teacher": {"reverse_kl_coefficient": 1.0, "discount": 0.9, "forward_kl_coefficient": 0.5}},
        "recompute_m2po": {"old_logprobs": "recompute", "masks": ("m2po",)},
        # Snapshots and the reference are scored in the policy's own shards.
        "adapter_snapshot": {"old_logprobs": "snapshot", "kl_coefficient": 0.05, "kl_reference_version": 0},
        "adapter_ewma": {"loss": "decoupled_ppo", "old_logprobs": "ewma", "old_logprobs_options": {"reset_below": 0}},
    }
)
ADAPTER = AdapterConfig(rank=4, alpha=8)


def make_trainer(folder: Path, recipe: str, world: World, versions: Path) -> PolicyTrainer:
    """A float64 trainer with small micro-batches and two minibatches; version 0 is ``folder``.

    Several ranks share prefixes, and have their moments in host memory in half of the recipes; they are compared with
    one in AdamW that shares none.
    """
    algorithm = AlgorithmConfig(**RECIPES[recipe])
    config = TrainerConfig(
        learning_rate=1e-2,
        minibatches=2,
        max_grad_norm=0.3,
        weight_decay=0.1,
        tokens_per_microbatch=48,
        gradient_checkpointing=True,
        optimizer="adamw_offload" if world.size > 1 and "snapshot" in recipe else "adamw",
        share_prefixes=world.size > 1,
        algorithm=algorithm,
    )
    return PolicyTrainer(
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
        batch = batch_of(*(list(group.trajectories) for group in batch.groups), *forked_groups(step), train_step=step)
        if trainer.settings(step).recipe.algorithm.reads_teachers:
            batch = with_teacher(batch, step, top_k=3)
        elif step > 1:  # every token truncated, and some
            batch = with_kept_sets(batch, step, full=0.3 * (step - 2))
        reports.append(trainer.train(batch, VERSIONS).to_json())
        trainer.export(out / str(step))
    return reports


def last_batch() -> Batch:
    """The batch that a trainer continues with, whose columns only some recipes read."""
    return with_teacher(random_batch(9, groups=5, train_step=STEPS + 1), 9, top_k=3)


def train_recipe(model: Path, out: Path, recipe: str) -> None:
    """Train the batches of the FSDP2 tests, and write what came out."""
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
    fresh.train(last_batch(), VERSIONS)
    fresh.export(out / "continued")
    if world.leads:
        (out / "reports.json").write_text(json.dumps(reports))


def compute_in_bfloat16(model: Path, out: Path) -> None:
    """Compute in bfloat16, as on CUDA, but over gloo: the scores beside those of the exported weights."""
    world = join_world("cpu")
    config = TrainerConfig(learning_rate=1e-2, algorithm=AlgorithmConfig(old_logprobs="current"))
    trainer = PolicyTrainer(model, config, world=world, mixed_precision=True)
    canary = canary_sequences(VOCAB)
    found = []
    for step in range(3):
        batch = random_batch(step, train_step=step + 1)
        trainer.export(out / str(step))
        scores = trainer.logprobs(canary, 0.7)
        trained = {(t.trajectory_id, t.position): t.logprob for t in trainer.explain(batch, VERSIONS)}
        if world.leads:
            alone = PolicyScorer.from_folder(out / str(step), device="cpu")
            canary_gap = np.abs(np.concatenate(scores) - np.concatenate(alone.logprobs(canary, 0.7))).max()
            other = PolicyTrainer(out / str(step), config, mixed_precision=False)
            other.restore_extra({"train_step": step})
            exact = {(t.trajectory_id, t.position): t.logprob for t in other.explain(batch, VERSIONS)}
            pass_gap = max(abs(exact[token] - value) for token, value in trained.items())
            found.append({"canary": float(canary_gap), "pass": float(pass_gap)})
        if step < 2:
            trainer.train(batch, VERSIONS)
    if world.leads:
        (out / "gaps.json").write_text(json.dumps(found))


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
        ranks.catalog.update([policy_record(0)])
    return ranks


def train(ranks: RankCoordinator, ahead: int = 0) -> StepReport:
    """Train the batch, its first groups ahead of it."""
    settings = ranks.trainer.settings(1)
    if ahead:
        ranks.accumulate(BATCH.groups[:ahead])
    return ranks.train(BATCH, settings)


def first_moments(trainer: PolicyTrainer) -> dict[str, torch.Tensor]:
    state = {name: tensor for name, tensor in sorted(trainer.state_tensors().items()) if name.endswith("exp_avg")}
    return {name: t.full_tensor() if isinstance(t, DTensor) else t for name, t in state.items()}


def read_other_settings(run_file: Path, out: Path, change: str, ahead: str) -> None:
    """Train a batch by the orders of rank 0, its first groups ahead of it; the other rank's run file has a change.

    It is the pod that a rolling upgrade replaced first. Rank 0 writes the report and Adam's first moments.
    """
    ranks = ranks_of(load_run_config(run_file, [change] if local_rank() else [], environ={}))
    if ranks.world.leads:
        report = train(ranks, int(ahead))
        ranks.dismiss()
        (out / "report.json").write_text(json.dumps(report.to_json()))
    else:
        ranks.follow()
    moments = first_moments(ranks.trainer)
    if ranks.world.leads:
        save_file(moments, out / "moments.safetensors")


FULL_AT = ("rank-00001.json", "rank-00000.json", "COMMITTED")
"""Files that have no room: each save fails at one of them, and the one after it at the next."""


def fill_disk(model: Path, root: Path) -> None:
    """Save the state while the disk runs full at one place after another."""
    world = join_world("cpu")
    checkpoints = CheckpointStore(root, b"a secret of at least thirty-two b")
    trainer = PolicyTrainer(model, TrainerConfig(), world=world)
    ranks = RankCoordinator(trainer, world, checkpoints, PolicyCatalog(checkpoints))
    saves = 0

    def write_new_file(path: Path, data: bytes) -> None:
        nonlocal saves
        if path.name.startswith("rank-"):
            saves += 1
        if saves <= len(FULL_AT) and path.name == FULL_AT[saves - 1]:
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        durable.write_new_file(path, data)

    states.write_new_file = committed.write_new_file = write_new_file
    if world.leads:
        for place in FULL_AT:
            try:
                ranks.save("s", 0, {})
            except CheckpointError as error:
                assert error.reason == Reason.DISK_FULL, error
                assert not list(root.glob("states/*")), place
                print("full", place)
        state = ranks.save("s", 0, {})
        ranks.load(state)
        print("saved", state.folder.name)
        ranks.dismiss()
    else:
        ranks.follow()
        print("followed to the end")


class LivelyCatalog(PolicyCatalog):
    """A catalog that hears of a further policy after each look at the known ones."""

    def snapshot(self) -> tuple[tuple[PolicyRecord, ...], Mapping[int, int]]:
        found = super().snapshot()
        self.update([policy_record(len(found[0]))])
        return found


def announce(root: Path) -> None:
    """Print with which policies a rank carries out orders, between which rank 0 hears of further ones."""
    world = join_world("cpu")
    checkpoints = CheckpointStore(root, b"a secret of at least thirty-two b")
    catalog = (LivelyCatalog if world.leads else PolicyCatalog)(checkpoints)
    trainer = SimpleNamespace(
        accumulate=lambda _, steps: print("accumulate", dict(steps)),
        end_stage=lambda _, steps, kept: print("end_stage", dict(steps)),
        train=lambda _, steps, *others: print("train", dict(steps)),
    )
    ranks = RankCoordinator(cast(PolicyTrainer, trainer), world, checkpoints, catalog)
    if world.leads:
        for _ in range(2):
            ranks.accumulate(BATCH.groups)
            ranks.end_stage((), ())
            ranks.train(BATCH, step_settings())
        ranks.dismiss()
    else:
        ranks.follow()


def wait(folder: Path) -> None:
    """Send an order late as rank 0, then end without leaving the group; rank 1 prints how its waits end."""
    world = join_world("cpu")
    if world.leads:
        (folder / "waited").read_bytes()
        broadcast_bytes(b"late", world)
        os._exit(0)  # as after a kill: the kernel closes the connections
    # The collective calls of training keep their limit, which is made short here.
    _set_pg_timeout(timedelta(seconds=1), dist.group.WORLD)
    with ThreadPoolExecutor(1) as pool:
        order = pool.submit(broadcast_bytes, None, world)
        try:
            sum_over_ranks(torch.zeros(1), world)
        except RuntimeError as error:
            print("training:", error)
        (folder / "waited").write_bytes(b"")
        print("order:", order.result().decode())
    try:
        broadcast_bytes(None, world)
    except RuntimeError as error:
        print("leader:", error)


SCENES = {
    scene.__name__: scene
    for scene in (train_recipe, compute_in_bfloat16, read_other_settings, fill_disk, announce, wait)
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    arguments = [Path(argument) if "/" in argument else argument for argument in sys.argv[2:]]
    SCENES[sys.argv[1]](*arguments)
    leave_world()
