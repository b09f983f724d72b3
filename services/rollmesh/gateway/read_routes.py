"""Endpoints of the REST API that show the run, one method each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import StreamingResponse

import rollmesh
from rollmesh.config import RunConfig
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.mesh_snapshot import finished_evaluations, generator_views
from rollmesh.gateway.models.api_model import About, ErrorBody
from rollmesh.gateway.models.items import (
    DeadLetterList,
    DeadLetterView,
    GeneratorList,
    ListState,
    PolicyList,
    PolicyView,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.viewer import Viewer
from rollmesh.runtime.token_check import Check
from rollmesh.scheduling import Schedule
from rollmesh.store import TrajectoryStore

PREFIX = "/api/v1"
MOST_POINTS = 2000
MOST_TOKENS = 16_384

TrajectoryId = Annotated[str, Path(description="Trajectory id.", min_length=1, max_length=200)]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of the errors of an endpoint."""
    texts = {
        400: "A parameter or the body is invalid.",
        401: "The token is missing or invalid.",
        404: "The requested object does not exist in the run.",
        409: "The state of the run does not allow the action.",
        503: "Redis is unreachable, or there are too many clients.",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in (*statuses, 503)}


class ReadRoutes:
    """Read-only endpoints; they raise ``ApiError`` and the errors of the store."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller, viewer: Viewer) -> None:
        self._config = config
        self._store = store
        self._poller = poller
        self._viewer = viewer

    def router(self, check: Check) -> APIRouter:
        """Return the routes; ``check`` guards each of them."""
        api = APIRouter(prefix=PREFIX, tags=["read"], dependencies=[Depends(check)])
        stream = {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "`event: snapshot` with a SnapshotEvent, then `event: tick` with a TickEvent per poll; "
            "a client that reads too slowly receives a new snapshot.",
        }
        api.get("/about", responses=error_responses(401))(self.about)
        api.get("/overview", responses=error_responses(401))(self.overview)
        api.get("/timeline", responses=error_responses(401))(self.timeline)
        api.get("/events", response_class=StreamingResponse, responses={200: stream, **error_responses(400, 401)})(
            self.events
        )
        api.get("/series", responses=error_responses(400, 401))(self.series)
        api.get("/trajectories", responses=error_responses(400, 401))(self.trajectories)
        api.get("/trajectories/{trajectory_id}", responses=error_responses(400, 401, 404))(self.trajectory)
        api.get("/policies", responses=error_responses(401))(self.policies)
        api.get("/generators", responses=error_responses(401))(self.generators)
        api.get("/dead-letters", responses=error_responses(401))(self.dead_letters)
        return api

    async def about(self) -> About:
        """Show the fixed facts of the run."""
        config, schedule = self._config, Schedule.from_config(self._config)
        return About(
            run=config.name,
            version=rollmesh.__version__,
            train_steps=config.trainer.train_steps,
            group_size=schedule.group_size,
            groups_per_batch=config.schedule.groups_per_batch,
            max_staleness=schedule.max_staleness,
            text=self._viewer.has_text,
            token_for_reads=config.gateway.token_for_reads,
            sample_seconds=config.gateway.sample_seconds,
        )

    async def overview(self) -> Overview:
        """Show the newest state of the run."""
        return self._poller.overview()

    async def timeline(self) -> Timeline:
        """Show the rollouts in progress or recently ended, with the policy versions that wrote them."""
        return self._poller.timeline()

    async def events(
        self, last_event_id: Annotated[int | None, Header(description="Id of the last event received.", ge=0)] = None
    ) -> StreamingResponse:
        """Stream the live state of the run as server-sent events."""
        return StreamingResponse(
            self._poller.hub.follow(last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def series(
        self,
        names: Annotated[str, Query(description="Comma-separated names; empty selects all curves.")] = "",
        points: Annotated[int, Query(description="Maximum number of points per curve.", ge=2, le=MOST_POINTS)] = 300,
    ) -> SeriesAnswer:
        """Show curves: reward, length, staleness, throughput, evaluations and more."""
        return self._poller.curves.answer([name.strip() for name in names.split(",") if name.strip()], points)

    async def trajectories(
        self,
        state: Annotated[ListState | None, Query(description="Filter by state.")] = None,
        cursor: Annotated[str | None, Query(description="next_cursor of the previous page.", max_length=200)] = None,
        limit: Annotated[int, Query(description="Maximum number of rows.", ge=1, le=500)] = 100,
    ) -> TrajectoryPage:
        """List the trajectories of the queue, oldest group first."""
        return await self._viewer.page(state, cursor, limit)

    async def trajectory(
        self,
        trajectory_id: TrajectoryId,
        first_token: Annotated[int, Query(description="First token position, counted from the prompt.", ge=0)] = 0,
        token_limit: Annotated[int, Query(description="Maximum number of tokens.", ge=1, le=MOST_TOKENS)] = 4096,
    ) -> TrajectoryDetail:
        """Show one trajectory token by token, from the queue or, once trained, from a batch file."""
        return await self._viewer.detail(trajectory_id, first_token, token_limit)

    async def policies(
        self, limit: Annotated[int, Query(description="Maximum number of policies.", ge=1, le=1000)] = 100
    ) -> PolicyList:
        """List announced policies, newest first."""
        policies = await self._store.policies.announced()
        generators = await self._store.generators.live()
        pinned = await self._store.policies.pinned()
        points = {point.policy_version: point for point in finished_evaluations(await self._store.evaluations.all())}
        newest = policies[-1].policy_version if policies else -1
        views = [
            PolicyView(
                policy_version=policy.policy_version,
                train_step=policy.train_step,
                newest=policy.policy_version == newest,
                pinned=policy.policy_version == pinned,
                generators=sum(g.serving and g.policy_version == policy.policy_version for g in generators),
                evaluation=points.get(policy.policy_version),
            )
            for policy in reversed(policies[-limit:])
        ]
        return PolicyList(policies=views, total=len(policies))

    async def generators(self) -> GeneratorList:
        """List the live generators."""
        latest = await self._store.policies.latest()
        newest = -1 if latest is None else latest.policy_version
        return GeneratorList(generators=generator_views(await self._store.generators.live(), newest))

    async def dead_letters(
        self, limit: Annotated[int, Query(description="Maximum number of dead letters.", ge=1, le=1000)] = 100
    ) -> DeadLetterList:
        """List failed trajectories, newest first."""
        views = [
            DeadLetterView(
                trajectory_id=letter.trajectory_id,
                group_id=letter.group_id,
                reason=letter.reason,
                time=letter.time_seconds,
                attempts=letter.attempts,
                tokens=letter.token_count,
                replayed_as=letter.replayed_as,
            )
            for letter in await self._store.dead_letters.newest(limit)
        ]
        return DeadLetterList(dead_letters=views, total=(await self._store.mesh.counts()).dead_letters)
