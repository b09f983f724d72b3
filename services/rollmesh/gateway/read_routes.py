"""Endpoints of the REST API that show the run, one method each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Path, Query
from fastapi.responses import StreamingResponse

from rollmesh.gateway.curves import NAMES_PATTERN, names_of
from rollmesh.gateway.models.items import (
    BatchList,
    BatchOrder,
    BatchPage,
    DeadLetterList,
    Done,
    GeneratorList,
    ListState,
    LogTail,
    PolicyList,
    ProcessList,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.models.overview import About, ErrorBody, RunSettings
from rollmesh.gateway.run_reads import RunReads
from rollmesh.runtime.api_app import Check
from rollmesh.store.inspection import CURSOR_PATTERN

PREFIX = "/api/v1"
MOST_POINTS = 2000
MOST_TOKENS = 16_384
MOST_LINES = 500

TrajectoryId = Annotated[str, Path(description="Trajectory id.", min_length=1, max_length=200)]


def error_responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of the errors of an endpoint."""
    texts = {
        400: "A parameter or the body is invalid.",
        401: "The token is missing or invalid.",
        404: "The requested object does not exist in the run.",
        409: "The run, or its machine, does not allow the action now.",
        503: "Redis is unreachable, or there are too many clients.",
    }
    return {status: {"model": ErrorBody, "description": texts[status]} for status in (*statuses, 503)}


class ReadRoutes:
    """Read-only endpoints; they raise ``ApiError`` and the errors of the store."""

    def __init__(self, reads: RunReads) -> None:
        self._reads = reads

    def router(self, check: Check, token: Check) -> APIRouter:
        """Return the routes; ``check`` guards all, and ``token`` the run file and logs, which may have credentials."""
        api = APIRouter(prefix=PREFIX, tags=["read"], dependencies=[Depends(check)])
        stream = {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "`event: snapshot` with a SnapshotEvent, then `event: tick` with a TickEvent per poll; "
            "a client that reads too slowly receives a new snapshot. `event: end` with an EndEvent is the last one, "
            "before the gateway shuts down.",
        }
        api.get("/about", responses=error_responses(401))(self.about)
        api.get("/config", responses=error_responses(401), dependencies=[Depends(token)])(self.settings)
        api.get("/token", responses=error_responses(401), dependencies=[Depends(token)])(self.token)
        api.get("/overview", responses=error_responses(401))(self.overview)
        api.get("/timeline", responses=error_responses(401))(self.timeline)
        api.get("/events", response_class=StreamingResponse, responses={200: stream, **error_responses(400, 401)})(
            self.events
        )
        api.get("/series", responses=error_responses(400, 401))(self.series)
        api.get("/trajectories", responses=error_responses(400, 401, 404))(self.trajectories)
        api.get("/trajectories/{trajectory_id}", responses=error_responses(400, 401, 404))(self.trajectory)
        api.get("/batches", responses=error_responses(401))(self.batches)
        api.get("/batches/{train_step}", responses=error_responses(400, 401, 404))(self.batch)
        api.get("/policies", responses=error_responses(401))(self.policies)
        api.get("/generators", responses=error_responses(401))(self.generators)
        api.get("/dead-letters", responses=error_responses(401))(self.dead_letters)
        api.get("/processes", responses=error_responses(401))(self.processes)
        api.get("/logs/{name}", responses=error_responses(400, 401, 404), dependencies=[Depends(token)])(self.log)
        return api

    async def about(self) -> About:
        """Show the fixed facts of the run."""
        return self._reads.about()

    async def settings(self) -> RunSettings:
        """Show the resolved run file, without its secrets; always needs the token."""
        return self._reads.settings()

    async def token(self) -> Done:
        """Check the token."""
        return Done(done="the token is valid")

    async def overview(self) -> Overview:
        """Show the newest state of the run."""
        return self._reads.overview()

    async def timeline(self) -> Timeline:
        """Show the rollouts in progress or recently ended, with the policy versions that wrote them."""
        return self._reads.timeline()

    async def events(
        self, last_event_id: Annotated[int | None, Header(description="Id of the last event received.", ge=0)] = None
    ) -> StreamingResponse:
        """Stream the live state of the run as server-sent events."""
        return StreamingResponse(
            self._reads.follow(last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    async def series(
        self,
        names: Annotated[
            str,
            Query(
                description="Comma-separated names; empty selects all curves.",
                json_schema_extra={"pattern": NAMES_PATTERN},  # not validated here: the error names the unknown curve
            ),
        ] = "",
        points: Annotated[int, Query(description="Maximum number of points per curve.", ge=2, le=MOST_POINTS)] = 300,
    ) -> SeriesAnswer:
        """Show curves: reward, length, staleness, throughput, evaluations and more."""
        return self._reads.series(names_of(names), points)

    async def trajectories(
        self,
        state: Annotated[ListState | None, Query(description="Filter by state.")] = None,
        cursor: Annotated[
            str | None,
            Query(description="next_cursor of the previous page, in the same state and order.", pattern=CURSOR_PATTERN),
        ] = None,
        limit: Annotated[int, Query(description="Maximum number of rows.", ge=1, le=500)] = 100,
        order: Annotated[QueueOrder, Query(description="Order; the oldest 20,000 are sorted.")] = "queue",
        descending: Annotated[bool, Query(description="Highest first; without effect in the queue's order.")] = False,
        preview: Annotated[bool, Query(description="With a preview of the text.")] = False,
    ) -> TrajectoryPage:
        """List the trajectories of the queue, oldest group first or sorted."""
        return await self._reads.trajectories(state, cursor, limit, order, descending, preview)

    async def trajectory(
        self,
        trajectory_id: TrajectoryId,
        first_token: Annotated[int, Query(description="First token position, counted from the prompt.", ge=0)] = 0,
        token_limit: Annotated[int, Query(description="Maximum number of tokens.", ge=1, le=MOST_TOKENS)] = 4096,
    ) -> TrajectoryDetail:
        """Show one trajectory token by token, from the queue or, once trained, from a batch file."""
        return await self._reads.trajectory(trajectory_id, first_token, token_limit)

    async def batches(self) -> BatchList:
        """List the train steps whose batch file can be read, newest first."""
        return await self._reads.batches()

    async def batch(
        self,
        train_step: Annotated[int, Path(description="Train step.", ge=1, le=2**53)],
        order: Annotated[BatchOrder, Query(description="Order of the trajectories.")] = "batch",
        descending: Annotated[bool, Query(description="Reverse the order.")] = False,
        first: Annotated[int, Query(description="Position of the first row.", ge=0)] = 0,
        limit: Annotated[int, Query(description="Maximum number of rows.", ge=1, le=500)] = 100,
    ) -> BatchPage:
        """List the trajectories of a batch file, each with a preview of its text."""
        return await self._reads.batch(train_step, order, descending, first, limit)

    async def policies(
        self, limit: Annotated[int, Query(description="Maximum number of policies.", ge=1, le=1000)] = 100
    ) -> PolicyList:
        """List announced policies, newest first."""
        return await self._reads.policies(limit)

    async def generators(self) -> GeneratorList:
        """List the live generators."""
        return await self._reads.generators()

    async def dead_letters(
        self, limit: Annotated[int, Query(description="Maximum number of dead letters.", ge=1, le=1000)] = 100
    ) -> DeadLetterList:
        """List failed trajectories, newest first."""
        return await self._reads.dead_letters(limit)

    async def processes(self) -> ProcessList:
        """List the processes of the run on this machine, with memory and CPU."""
        return await self._reads.processes()

    async def log(
        self,
        name: Annotated[str, Path(description="Name of a process.", pattern=r"^[a-z]{1,20}-[0-9]{1,4}$")],
        lines: Annotated[int, Query(description="Maximum number of lines.", ge=1, le=MOST_LINES)] = 40,
    ) -> LogTail:
        """Show the last lines of the log of a process; always needs the token."""
        return await self._reads.log(name, lines)
