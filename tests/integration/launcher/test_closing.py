"""A run is over when its last trainer state is on disk, whatever Redis says."""

import asyncio
import io
import shutil
import sys
from pathlib import Path

import torch
from rich.console import Console

from rollmesh.checkpoints.checkpoint_store import CheckpointStore
from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.launcher.local_mesh import local_mesh
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.run_up import _trained
from rollmesh.launcher.supervisor import ServiceSpec
from rollmesh.mesh import Cursor
from rollmesh.store import TrajectoryStore
from rollmesh.types import PolicyRecord

STEPS = 2
TRAINER = """
import pathlib, sys, time
while not pathlib.Path(sys.argv[1]).exists():
    time.sleep(0.02)
"""


async def announce_everything(store: TrajectoryStore) -> None:
    """Redis learns that every step is trained, committed and announced."""
    session = await store.training.open_session("trainer")
    policies = [
        PolicyRecord(policy_version=step, train_step=step, path=f"policies/{step}", manifest_digest="0" * 64)
        for step in range(STEPS + 1)
    ]
    groups = [(step, [f"e0-{step}"]) for step in range(1, STEPS + 1)]
    await store.training.reassert(session, STEPS, STEPS, groups, policies, Cursor())


def save_state(checkpoints: CheckpointStore, train_step: int) -> Path:
    tensors = {"weight": torch.zeros(2)}
    return checkpoints.save_state(
        session=f"s{train_step}", train_step=train_step, rollback_count=0, tensors=tensors, extra={}
    ).folder


async def test_a_run_whose_newest_state_is_gone_is_not_over_before_the_state_is_on_disk(tmp_path: Path) -> None:
    run = RunConfig.model_validate(
        {"name": "closing", "folder": str(tmp_path), "model": {"path": "m"}, "trainer": {"train_steps": STEPS}}
    )
    checkpoints = open_checkpoints(run)
    save_state(checkpoints, 1)
    newest = save_state(checkpoints, STEPS)
    trainer = ServiceSpec(
        service="trainer",
        index=0,
        command=[sys.executable, "-c", TRAINER, str(tmp_path / "ends")],
        environment={},
        log_file=tmp_path / "trainer-0.log",
        one_shot=True,
    )
    async with local_mesh(run, RunFolder(tmp_path), asyncio.Event(), Console(file=io.StringIO())) as mesh:
        mesh.supervisor.start(trainer)
        try:
            assert not await _trained(mesh)
            await announce_everything(mesh.store)
            assert not await _trained(mesh), "the trainer still runs, and may yet end with an error"
            (tmp_path / "ends").touch()
            await mesh.until(lambda: _trained(mesh), "the end of the trainer", 120.0)
            shutil.rmtree(newest)
            assert not await _trained(mesh)
            save_state(checkpoints, STEPS)
            await mesh.until(lambda: _trained(mesh), "the end of the trainer", 120.0)
        finally:
            await mesh.supervisor.kill_all()
