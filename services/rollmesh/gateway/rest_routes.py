"""The REST API, one function per endpoint.

GET     /api/v1/about                          fixed facts of the run
GET     /api/v1/overview                       newest state of the run
GET     /api/v1/events                         server-sent events: one ``snapshot``, then a ``tick`` per poll
GET     /api/v1/timeline                       rollouts in progress, with their policy versions
GET     /api/v1/series                         curves over train steps, versions and time
GET     /api/v1/trajectories                   the queue, page by page
GET     /api/v1/trajectories/{id}              one trajectory, token by token
GET     /api/v1/policies                       announced policies
GET     /api/v1/generators                     live generators
GET     /api/v1/dead-letters                   failed trajectories
GET     /api/v1/token                          check of the token
POST    /api/v1/pause, /api/v1/resume          stop and allow new leases
POST    /api/v1/policies/{version}/pin         pin the generators to a version
POST    /api/v1/policies/{version}/rollback    continue from an older version
POST    /api/v1/unpin                          follow the newest version
POST    /api/v1/dead-letters/{id}/replay       return a prompt to the run
DELETE  /api/v1/dead-letters/{id}              delete a dead letter
POST    /api/v1/scale                          set the number of local processes of a service
"""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import StreamingResponse

from rollmesh.gateway.backend_protocols import Actions, Reads
from rollmesh.gateway.models import (
    About,
    DeadLetterList,
    Done,
    ErrorBody,
    GeneratorList,
    ListState,
    Overview,
    PolicyList,
    ScaleRequest,
    SeriesAnswer,
    Timeline,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.runtime.token_check import Check

PREFIX = "/api/v1"
MOST_POINTS = 2000
MOST_TOKENS = 16_384

TrajectoryId = Annotated[str, Path(description="Trajectory id.", min_length=1, max_length=200)]
Version = Annotated[int, Path(description="Policy version.", ge=0, le=2**53)]


def _errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    texts = {
        400: "A parameter or the body is invalid.",
        401: "The token is missing or invalid.",
        404: "The requested object does not exist in the run.",
        409: "The state of the run does not allow the action.",
        503: "Redis is unreachable, or there are too many clients.",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in (*statuses, 503)}


def read_router(reads: Reads, check: Check) -> APIRouter:
    """Return the routes of read-only endpoints."""
    api = APIRouter(prefix=PREFIX, tags=["read"], dependencies=[Depends(check)])

    @api.get("/about", responses=_errors(401))
    async def about() -> About:
        """Show the fixed facts of the run."""
        return reads.about()

    @api.get("/overview", responses=_errors(401))
    async def overview() -> Overview:
        """Show the newest state of the run."""
        return reads.overview()

    @api.get("/timeline", responses=_errors(401))
    async def timeline() -> Timeline:
        """Show the rollouts in progress or recently ended, with the policy versions that wrote them."""
        return reads.timeline()

    @api.get(
        "/events",
        response_class=StreamingResponse,
        responses={
            200: {
                "content": {"text/event-stream": {"schema": {"type": "string"}}},
                "description": "`event: snapshot` with a SnapshotEvent, then `event: tick` with a TickEvent per poll; "
                "a client that reads too slowly receives a new snapshot.",
            },
            **_errors(400, 401),
        },
    )
    async def events(
        last_event_id: Annotated[int | None, Header(description="Id of the last event received.", ge=0)] = None,
    ) -> StreamingResponse:
        """Stream the live state of the run as server-sent events."""
        return StreamingResponse(
            reads.events(last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @api.get("/series", responses=_errors(400, 401))
    async def series(
        names: Annotated[str, Query(description="Comma-separated names; empty selects all curves.")] = "",
        points: Annotated[int, Query(description="Maximum number of points per curve.", ge=2, le=MOST_POINTS)] = 300,
    ) -> SeriesAnswer:
        """Show curves: reward, length, staleness, throughput, evaluations and more."""
        return reads.series([name.strip() for name in names.split(",") if name.strip()], points)

    _add_lists(api, reads)
    return api


def _add_lists(api: APIRouter, reads: Reads) -> None:
    @api.get("/trajectories", responses=_errors(400, 401))
    async def trajectories(
        state: Annotated[ListState | None, Query(description="Filter by state.")] = None,
        cursor: Annotated[str | None, Query(description="next_cursor of the previous page.", max_length=200)] = None,
        limit: Annotated[int, Query(description="Maximum number of rows.", ge=1, le=500)] = 100,
    ) -> TrajectoryPage:
        """List the trajectories of the queue, oldest group first."""
        return await reads.trajectories(state, cursor, limit)

    @api.get("/trajectories/{trajectory_id}", responses=_errors(400, 401, 404))
    async def trajectory(
        trajectory_id: TrajectoryId,
        first_token: Annotated[int, Query(description="First token position, counted from the prompt.", ge=0)] = 0,
        token_limit: Annotated[int, Query(description="Maximum number of tokens.", ge=1, le=MOST_TOKENS)] = 4096,
    ) -> TrajectoryDetail:
        """Show one trajectory token by token, from the queue or, once trained, from a batch file."""
        return await reads.trajectory(trajectory_id, first_token, token_limit)

    @api.get("/policies", responses=_errors(401))
    async def policies(
        limit: Annotated[int, Query(description="Maximum number of policies.", ge=1, le=1000)] = 100,
    ) -> PolicyList:
        """List announced policies, newest first."""
        return await reads.policies(limit)

    @api.get("/generators", responses=_errors(401))
    async def generators() -> GeneratorList:
        """List the live generators."""
        return await reads.generators()

    @api.get("/dead-letters", responses=_errors(401))
    async def dead_letters(
        limit: Annotated[int, Query(description="Maximum number of dead letters.", ge=1, le=1000)] = 100,
    ) -> DeadLetterList:
        """List failed trajectories, newest first."""
        return await reads.dead_letters(limit)


def action_router(actions: Actions, check: Check) -> APIRouter:
    """Return the routes of actions; every action requires the token."""
    api = APIRouter(prefix=PREFIX, tags=["act"], dependencies=[Depends(check)])

    @api.get("/token", responses=_errors(401))
    async def token() -> Done:
        """Check the token."""
        return Done(done="the token is valid")

    @api.post("/pause", responses=_errors(401, 409))
    async def pause() -> Done:
        """Pause the run: no new leases; rollouts in progress are parked as partial trajectories."""
        return await actions.pause(True)

    @api.post("/resume", responses=_errors(401, 409))
    async def resume() -> Done:
        """Resume a paused run."""
        return await actions.pause(False)

    @api.post("/policies/{version}/pin", responses=_errors(400, 401, 404, 409))
    async def pin(version: Version) -> Done:
        """Pin the generators to one policy version."""
        return await actions.pin(version)

    @api.post("/unpin", responses=_errors(401))
    async def unpin() -> Done:
        """Let the generators follow the newest version."""
        return await actions.unpin()

    @api.post("/policies/{version}/rollback", responses=_errors(400, 401, 404, 409))
    async def roll_back(version: Version) -> Done:
        """Continue from an older policy; the trainer performs the rollback between two steps."""
        return await actions.roll_back(version)

    @api.post("/dead-letters/{trajectory_id}/replay", responses=_errors(400, 401, 404, 409))
    async def replay(trajectory_id: TrajectoryId) -> Done:
        """Return the prompt of a dead letter to the run, as a new group."""
        return await actions.replay(trajectory_id)

    @api.delete("/dead-letters/{trajectory_id}", responses=_errors(400, 401, 404))
    async def delete_letter(trajectory_id: TrajectoryId) -> Done:
        """Delete a dead letter and its tokens."""
        return await actions.delete_letter(trajectory_id)

    @api.post("/scale", responses=_errors(400, 401, 409))
    async def scale(request: ScaleRequest) -> Done:
        """Request a number of processes of a service from the launcher."""
        return await actions.scale(request)

    return api
