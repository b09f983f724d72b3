"""A run on this machine: evaluation before, training with its evaluations, evaluation after."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from rich.console import Console

from rollmesh.config import RunConfig
from rollmesh.launcher.evaluating import evaluate_version, finish_evaluations
from rollmesh.launcher.evaluations import finished_evaluation
from rollmesh.launcher.local_mesh import Interrupted, LocalMesh, local_mesh
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """How a run ended."""

    folder: RunFolder
    trained_step: int
    finished: bool
    """False when a person stopped it."""
    restarts: dict[str, int]
    """Restarts by service process."""


async def run_up(config: RunConfig, shutdown: asyncio.Event, console: Console) -> RunResult:
    """Start or continue the run of ``config``; returns when it is trained, or stopped by ``shutdown``.

    Raises ServiceFailed when a service cannot be kept up, ConfigError when another launcher holds the folder.
    """
    with locked_run_folder(config) as folder:
        async with local_mesh(config, folder, shutdown, console) as mesh:
            finished = True
            try:
                await _train(mesh)
            except Interrupted:
                finished = False
                mesh.progress.note("stopped; the same command continues this run")
            await mesh.evaluations.update()
            view = await mesh.store.view()
            return RunResult(
                folder=folder,
                trained_step=view.trained_step,
                finished=finished,
                restarts=mesh.supervisor.restart_counts(),
            )


async def _train(mesh: LocalMesh) -> None:
    before_and_after = mesh.config.evaluation.before_and_after
    if before_and_after and await finished_evaluation(mesh.store, 0) is None:
        await mesh.store.set_user_paused(True)
    async with mesh.services():
        await mesh.until_serving()
        if before_and_after:
            await evaluate_version(mesh, 0)
        await mesh.store.set_user_paused(False)
        mesh.progress.note(f"training to step {mesh.config.trainer.train_steps}; Ctrl-C drains and keeps everything")

        async def trained() -> bool:
            view = await mesh.store.view()
            return view.trained_enough and view.policy_train_step >= mesh.config.trainer.train_steps

        await mesh.until(trained, "the last train step")
        if before_and_after:
            await evaluate_version(mesh, await mesh.latest_version())
        await finish_evaluations(mesh)
