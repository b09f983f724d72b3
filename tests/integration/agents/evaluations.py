"""Requests and results of evaluations, for the tests."""

from __future__ import annotations

from rollmesh.store.evaluation_requests import evaluation_request
from rollmesh.store.queue_types import EvalResult

from .agent_mesh import AgentMesh


async def request(mesh: AgentMesh, version: int) -> None:
    await mesh.store.evaluations.request(evaluation_request(mesh.config.evaluation, version))


async def result_of(mesh: AgentMesh, version: int) -> EvalResult:
    found: list[EvalResult] = []

    async def finished() -> bool:
        records = await mesh.store.evaluations.all()
        found.extend(r.result for r in records if r.result is not None and r.request.policy_version == version)
        return bool(found)

    await mesh.until(f"the evaluation of version {version}", finished)
    return found[0]
