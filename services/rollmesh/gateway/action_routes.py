"""Endpoints of the REST API that act on the run, one method each."""

import asyncio
from typing import Annotated

from fastapi import APIRouter, Depends, Path

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import check_scale
from rollmesh.errors import ConfigError, Conflict
from rollmesh.gateway.events import GatewayMetrics
from rollmesh.gateway.models.items import Done, ScaleRequest
from rollmesh.gateway.read_routes import PREFIX, TrajectoryId, error_responses
from rollmesh.runtime.api_app import Check
from rollmesh.runtime.capacity import check_capacity
from rollmesh.runtime.request_guard import NotFound
from rollmesh.store import TrajectoryStore

Version = Annotated[int, Path(description="Policy version.", ge=0, le=2**53)]


class ActionRoutes:
    """Operator actions; they raise ``NotFound`` and the errors of the store, including Conflict."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, metrics: GatewayMetrics) -> None:
        self._config = config
        self._store = store
        self._metrics = metrics

    def router(self, check: Check) -> APIRouter:
        """Return the routes; every action requires the token."""
        api = APIRouter(prefix=PREFIX, tags=["act"], dependencies=[Depends(check)])
        api.post("/pause", responses=error_responses(401, 409))(self.pause)
        api.post("/resume", responses=error_responses(401, 409))(self.resume)
        api.post("/policies/{version}/pin", responses=error_responses(400, 401, 404, 409))(self.pin)
        api.post("/unpin", responses=error_responses(401))(self.unpin)
        api.post("/policies/{version}/rollback", responses=error_responses(400, 401, 404, 409))(self.roll_back)
        api.post("/dead-letters/{trajectory_id}/replay", responses=error_responses(400, 401, 404, 409))(self.replay)
        api.delete("/dead-letters/{trajectory_id}", responses=error_responses(400, 401, 404))(self.delete_letter)
        api.post("/scale", responses=error_responses(400, 401, 409))(self.scale)
        return api

    async def pause(self) -> Done:
        """Pause the run: no new leases; rollouts in progress are parked as partial trajectories."""
        await self._store.settings.set_user_paused(True)
        self._count("pause")
        return Done(done="paused: rollouts in progress are parked and kept")

    async def resume(self) -> Done:
        """Resume a paused run."""
        await self._store.settings.set_user_paused(False)
        self._count("resume")
        return Done(done="resumed")

    async def pin(self, version: Version) -> Done:
        """Pin the generators to one policy version."""
        await self._check_announced(version)
        await self._store.policies.pin(version)
        self._count("pin")
        return Done(done=f"pinned to policy version {version}")

    async def unpin(self) -> Done:
        """Let the generators follow the newest version."""
        await self._store.policies.pin(None)
        self._count("unpin")
        return Done(done="unpinned: generators follow the newest policy version")

    async def roll_back(self, version: Version) -> Done:
        """Continue from an older policy; the trainer performs the rollback between two steps."""
        await self._check_announced(version)
        request = await self._store.rollbacks.request(version)
        self._count("rollback")
        return Done(
            done=f"rollback to policy version {version} requested: the trainer performs it before its next "
            "step, or at its next start if it has ended",
            request_id=request.request_id,
        )

    async def replay(self, trajectory_id: TrajectoryId) -> Done:
        """Return the prompt of a dead letter to the run, as a new group."""
        try:
            await self._store.dead_letters.get(trajectory_id)
        except Conflict as error:
            raise _no_letter(trajectory_id) from error
        group_id = await self._store.dead_letters.replay(trajectory_id)
        self._count("replay")
        return Done(
            done=f"{trajectory_id} is replayed as group {group_id} once the run has room for it", group_id=group_id
        )

    async def delete_letter(self, trajectory_id: TrajectoryId) -> Done:
        """Delete a dead letter and its tokens."""
        if not await self._store.dead_letters.delete(trajectory_id):
            raise _no_letter(trajectory_id)
        self._count("delete_letter")
        return Done(done=f"dead letter {trajectory_id} is deleted")

    async def scale(self, request: ScaleRequest) -> Done:
        """Request a number of processes of a service from the launcher."""
        if request.replicas is not None:
            try:
                check_scale(self._config, request.service, request.replicas)
                if not request.force:
                    asked = await self._store.scaling.requests()
                    await asyncio.to_thread(check_capacity, self._config, asked, request.service, request.replicas)
            except ConfigError as error:
                raise Conflict(str(error)) from error
        carried_out = await self._store.scaling.request(request.service, request.replicas)
        self._count("scale")
        replicas = "as in the run file" if request.replicas is None else f"{request.replicas}"
        launcher = "the launcher applies it" if carried_out else "no launcher runs that could apply it now"
        return Done(done=f"{request.service} replicas: {replicas}; {launcher}")

    def _count(self, action: str) -> None:
        self._metrics.actions.labels(action=action).inc()

    async def _check_announced(self, policy_version: int) -> None:
        if await self._store.policies.get(policy_version) is None:
            raise NotFound(
                f"policy version {policy_version} has not been announced",
                field="version",
                hint="GET /api/v1/policies lists them",
            )


def _no_letter(trajectory_id: str) -> NotFound:
    return NotFound(
        f"no dead letter {trajectory_id}", field="trajectory_id", hint="GET /api/v1/dead-letters lists them"
    )
