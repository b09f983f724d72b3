"""Evaluation requests to the mesh, and the wait for their results."""

from __future__ import annotations

from functools import partial

from rollmesh.launcher.evaluations import Evaluation
from rollmesh.launcher.local_mesh import OFTEN_SECONDS, LocalMesh
from rollmesh.store.evaluation_requests import due_versions, evaluation_floor, evaluation_request


async def evaluate_version(mesh: LocalMesh, policy_version: int) -> Evaluation:
    """Evaluate one policy version on the idle mesh, or return the result of an earlier start."""
    waiting_for = f"the evaluation of policy version {policy_version}"
    earlier = await mesh.answer(lambda: mesh.evaluations.finished(policy_version), waiting_for)
    if earlier is not None:
        return earlier
    await mesh.until_idle()
    request = evaluation_request(mesh.config.evaluation, policy_version)
    found: list[Evaluation] = []

    async def finished() -> bool:
        # Repeated at every poll: a Redis restored to an earlier state has lost the request.
        await mesh.store.evaluations.request(request)
        result = await mesh.evaluations.finished(policy_version)
        if result is not None:
            found.append(result)
        return result is not None

    await mesh.until(finished, waiting_for, poll_seconds=OFTEN_SECONDS)
    await mesh.answer(mesh.evaluations.update, waiting_for)
    return found[-1]


async def finish_evaluations(mesh: LocalMesh) -> None:
    """Pause the run and wait for every evaluation that is due or requested."""
    waiting_for = "evaluations in progress"
    newest = await mesh.answer(mesh.latest_version, waiting_for)
    every = mesh.config.evaluation.every_versions
    # The leader requests each of them, but may not have seen the last version yet.
    after = evaluation_floor(every, newest, mesh.config.checkpoints.keep_last)
    for version in due_versions(every, after, newest):
        request = evaluation_request(mesh.config.evaluation, version)
        await mesh.answer(partial(mesh.store.evaluations.request, request), waiting_for)

    async def all_answered() -> bool:
        return all(record.result is not None for record in await mesh.store.evaluations.all())

    if not await mesh.answer(all_answered, waiting_for):
        await mesh.until_idle()
        await mesh.until(all_answered, waiting_for, poll_seconds=OFTEN_SECONDS)
    await mesh.answer(mesh.evaluations.update, waiting_for)
