"""``rollmesh eval``: evaluation of one policy version on the fixed prompts of a run that is not in progress."""

from __future__ import annotations

import asyncio

from rich.console import Console

from rollmesh.checkpoints.location import open_checkpoints
from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.launcher.evaluating import evaluate_version
from rollmesh.launcher.evaluations import Evaluation
from rollmesh.launcher.local_mesh import LocalMesh, local_mesh
from rollmesh.launcher.run_folder import RunFolder, locked_run_folder

_WITHOUT_TRAINER = ("generator", "reward", "rollout")


async def evaluate_run(
    config: RunConfig, folder: RunFolder, policy_version: int | None, shutdown: asyncio.Event, console: Console
) -> Evaluation:
    """Evaluate ``policy_version`` (None: the newest) of a stopped run; start its services for the evaluation.

    Raises ConfigError while a launcher holds the folder (``evaluation.every_versions`` evaluates during a run), or
    when the version was never published or is pruned.
    """
    with locked_run_folder(config):
        async with local_mesh(config, folder, shutdown, console) as mesh:
            version = await _published(mesh, policy_version)
            await mesh.pause(True)
            async with mesh.services(_WITHOUT_TRAINER):
                await mesh.until_serving()
                return await evaluate_version(mesh, version)


async def _published(mesh: LocalMesh, policy_version: int | None) -> int:
    versions = [policy.policy_version for policy in await mesh.store.policies.announced()]
    if not versions:
        raise ConfigError(f"{mesh.folder.path}: the run has published no policy yet")
    if policy_version is None:
        return max(versions)
    if policy_version not in versions:
        raise ConfigError(f"--version {policy_version}: published versions are {min(versions)} to {max(versions)}")
    kept = await asyncio.to_thread(lambda: open_checkpoints(mesh.config).complete_policies())
    if policy_version not in (remaining := sorted({policy.policy_version for policy in kept})):
        raise ConfigError(
            f"--version {policy_version}: its weights are pruned (checkpoints.keep_last="
            f"{mesh.config.checkpoints.keep_last}); kept are {', '.join(map(str, remaining)) or 'none'}"
        )
    return policy_version
