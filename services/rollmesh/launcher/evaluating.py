"""Asking the mesh for evaluations, and waiting for them."""

from __future__ import annotations

from rollmesh.errors import StoreError
from rollmesh.launcher.evaluations import Evaluation, finished_evaluation
from rollmesh.launcher.local_mesh import LocalMesh
from rollmesh.store.evaluations import due_versions, evaluation_request


async def evaluate_version(mesh: LocalMesh, policy_version: int) -> Evaluation:
    """Evaluate one policy version on the idle mesh, unless an earlier start already did."""
    earlier = await finished_evaluation(mesh.store, policy_version)
    if earlier is not None:
        return earlier
    await mesh.until_idle()
    await mesh.store.request_evaluation(evaluation_request(mesh.config.evaluation, policy_version))

    async def answered() -> bool:
        return await finished_evaluation(mesh.store, policy_version) is not None

    await mesh.until(answered, f"the evaluation of policy version {policy_version}")
    result = await finished_evaluation(mesh.store, policy_version)
    if result is None:
        raise StoreError(f"the evaluation of policy version {policy_version} is gone from the store")
    await mesh.evaluations.update()
    return result


async def finish_evaluations(mesh: LocalMesh) -> None:
    """Pause the run and wait for every evaluation that is due or was asked for."""
    newest, every = await mesh.latest_version(), mesh.config.evaluation.every_versions
    # The leader asks for each of them; the last version may have been announced an instant ago.
    for version in due_versions(every, newest - every, newest):
        await mesh.store.request_evaluation(evaluation_request(mesh.config.evaluation, version))

    async def all_answered() -> bool:
        return all(record.result is not None for record in await mesh.store.evaluations())

    if not await all_answered():
        await mesh.until_idle()
        await mesh.until(all_answered, "evaluations under way")
    await mesh.evaluations.update()
