"""Endpoints of the REST API that show a run: declared here, and answered by ``LiveReads`` and by ``report.view``."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query
from fastapi import Path as PathParameter
from fastapi.responses import StreamingResponse

import rollmesh
from rollmesh.config import RunConfig
from rollmesh.config.load import run_file_text
from rollmesh.errors import CheckpointError
from rollmesh.gateway.archive import Archive, batch_page
from rollmesh.gateway.curves import NAMES_PATTERN
from rollmesh.gateway.events import EventHub
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
from rollmesh.gateway.run_processes import RunProcesses
from rollmesh.gateway.trajectory_views import archived_detail, open_pieces
from rollmesh.runtime.api_app import Check
from rollmesh.runtime.request_guard import NotFound
from rollmesh.scheduling import Schedule
from rollmesh.store.inspection import CURSOR_PATTERN

PREFIX = "/api/v1"
MOST_POINTS = 2000
MOST_TOKENS = 16_384
MOST_LINES = 500

TrajectoryId = Annotated[str, PathParameter(description="Trajectory id.", min_length=1, max_length=200)]


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


def run_facts(config: RunConfig, *, text: bool) -> About:
    """Return the fixed facts of a run; ``text`` is true if tokens come with their text."""
    schedule = Schedule.from_config(config)
    return About(
        run=config.name,
        version=rollmesh.__version__,
        folder=config.folder,
        train_steps=config.trainer.train_steps,
        group_size=schedule.group_size,
        groups_per_batch=config.schedule.groups_per_batch,
        max_staleness=schedule.max_staleness,
        text=text,
        token_for_reads=config.gateway.token_for_reads,
        sample_seconds=config.gateway.sample_seconds,
    )


class RunReads(ABC):
    """Read-only endpoints of one run, as of a run without a queue; they raise ``ApiError`` and errors of the store."""

    hub: EventHub

    def __init__(self, config: RunConfig, folder: Path) -> None:
        """Open the tokenizer, the batch files and the run folder, as far as this process can read them."""
        self._pieces, self._archive = open_pieces(config), Archive(config)
        self._processes = RunProcesses(folder)
        self._about = run_facts(config, text=self._pieces is not None)
        self._settings = RunSettings(yaml=run_file_text(config))

    def router(self, check: Check, token: Check) -> APIRouter:
        """Return the routes; ``check`` guards all, and ``token`` the run file and logs, which may have credentials."""
        api = APIRouter(prefix=PREFIX, tags=["read"], dependencies=[Depends(check)])
        stream = {
            "content": {"text/event-stream": {"schema": {"type": "string"}}},
            "description": "`event: snapshot` with a SnapshotEvent, then `event: tick` with a TickEvent per poll; "
            "a client that reads too slowly receives a new snapshot. `event: end` with an EndEvent is the last one, "
            "before the gateway shuts down.",
        }

        def get(path: str, declared: Callable[..., Awaitable[Any]], *errors: int, **options: Any) -> None:
            responses = options.pop("responses", {}) | error_responses(*errors, 401)
            api.get(path, responses=responses, **options)(self._answered(declared))

        guarded = {"dependencies": [Depends(token)]}
        get("/about", RunReads.about)
        get("/config", RunReads.settings, **guarded)
        get("/token", RunReads.token, **guarded)
        get("/overview", RunReads.overview)
        get("/timeline", RunReads.timeline)
        get("/events", RunReads.events, 400, response_class=StreamingResponse, responses={200: stream})
        get("/series", RunReads.series, 400)
        get("/trajectories", RunReads.trajectories, 400, 404)
        get("/trajectories/{trajectory_id}", RunReads.trajectory, 400, 404)
        get("/batches", RunReads.batches)
        get("/batches/{train_step}", RunReads.batch, 400, 404)
        get("/policies", RunReads.policies)
        get("/generators", RunReads.generators)
        get("/dead-letters", RunReads.dead_letters)
        get("/processes", RunReads.processes)
        get("/logs/{name}", RunReads.log, 400, 404, **guarded)
        return api

    def _answered(self, declared: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        """Return the endpoint of this run with the parameters and the text of its declaration."""
        answer = getattr(self, declared.__name__)

        @wraps(declared.__get__(self))
        async def endpoint(**parameters: Any) -> Any:
            return await answer(**parameters)

        return endpoint

    async def about(self) -> About:
        """Show the fixed facts of the run."""
        return self._about

    async def settings(self) -> RunSettings:
        """Show the resolved run file, without its secrets; always needs the token."""
        return self._settings

    async def token(self) -> Done:
        """Check the token."""
        return Done(done="the token is valid")

    @abstractmethod
    async def overview(self) -> Overview:
        """Show the newest state of the run."""

    @abstractmethod
    async def timeline(self) -> Timeline:
        """Show the rollouts in progress or recently ended, with the policy versions that wrote them."""

    async def events(
        self, last_event_id: Annotated[int | None, Header(description="Id of the last event received.", ge=0)] = None
    ) -> StreamingResponse:
        """Stream the live state of the run as server-sent events."""
        return StreamingResponse(
            self.hub.follow(last_event_id),
            media_type="text/event-stream",
            headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
        )

    @abstractmethod
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
        return TrajectoryPage(items=[], next_cursor=None)

    @abstractmethod
    async def trajectory(
        self,
        trajectory_id: TrajectoryId,
        first_token: Annotated[int, Query(description="First token position, counted from the prompt.", ge=0)] = 0,
        token_limit: Annotated[int, Query(description="Maximum number of tokens.", ge=1, le=MOST_TOKENS)] = 4096,
    ) -> TrajectoryDetail:
        """Show one trajectory token by token, from the queue or, once trained, from a batch file."""

    async def batches(self) -> BatchList:
        """List the train steps whose batch file can be read, newest first."""
        return BatchList(train_steps=list(reversed(await self._archive.steps())))

    async def batch(
        self,
        train_step: Annotated[int, PathParameter(description="Train step.", ge=1, le=2**53)],
        order: Annotated[BatchOrder, Query(description="Order of the trajectories.")] = "batch",
        descending: Annotated[bool, Query(description="Reverse the order.")] = False,
        first: Annotated[int, Query(description="Position of the first row.", ge=0)] = 0,
        limit: Annotated[int, Query(description="Maximum number of rows.", ge=1, le=500)] = 100,
    ) -> BatchPage:
        """List the trajectories of a batch file, each with a preview of its text."""
        try:
            rows = await self._archive.rows(train_step)
        except CheckpointError as error:
            raise NotFound(f"the batch file of step {train_step} cannot be read: {error}") from error
        if rows is None:
            raise NotFound(
                f"step {train_step} has no batch file here", field="train_step", hint="GET /api/v1/batches lists them"
            )
        # Decode in a thread: the previews of hundreds of rows take a while.
        return await asyncio.to_thread(batch_page, train_step, rows, order, descending, first, limit, self._pieces)

    @abstractmethod
    async def policies(
        self, limit: Annotated[int, Query(description="Maximum number of policies.", ge=1, le=1000)] = 100
    ) -> PolicyList:
        """List announced policies, newest first."""

    async def generators(self) -> GeneratorList:
        """List the live generators."""
        return GeneratorList(generators=[])

    async def dead_letters(
        self, limit: Annotated[int, Query(description="Maximum number of dead letters.", ge=1, le=1000)] = 100
    ) -> DeadLetterList:
        """List failed trajectories, newest first."""
        return DeadLetterList(dead_letters=[], total=0)

    async def processes(self) -> ProcessList:
        """List the processes of the run on this machine, with memory and CPU."""
        return await self._processes.list()

    async def log(
        self,
        name: Annotated[str, PathParameter(description="Name of a process.", pattern=r"^[a-z]{1,20}-[0-9]{1,4}$")],
        lines: Annotated[int, Query(description="Maximum number of lines.", ge=1, le=MOST_LINES)] = 40,
    ) -> LogTail:
        """Show the last lines of the log of a process; always needs the token."""
        return await self._processes.log(name, lines)

    async def _in_batches(
        self, trajectory_id: str, left_at: int | None, trained_step: int, first_token: int, token_limit: int
    ) -> TrajectoryDetail | None:
        """Return a trajectory of a batch file, None without one; ``left_at`` is the step at which it left the queue."""
        try:
            found = await self._archive.find(trajectory_id.rpartition(".")[0], left_at)
        except CheckpointError as error:
            raise NotFound(
                f"{trajectory_id}: a batch file that may have it cannot be read: {error}",
                field="trajectory_id",
                hint="rollmesh audit names every file that is damaged",
            ) from error
        if found is None:
            return None
        shown = (first_token, token_limit, self._pieces)
        return await asyncio.to_thread(archived_detail, found, trajectory_id, trained_step, *shown)
