"""Reads of a live run: the newest poll of the mesh, the queue and the batch files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.config.load import run_file_text
from rollmesh.gateway.archive import Archive
from rollmesh.gateway.batch_lists import BatchLists
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.mesh_snapshot import finished_evaluations, generator_views
from rollmesh.gateway.models.api_model import About
from rollmesh.gateway.models.batch_pages import BatchList, BatchOrder, BatchPage
from rollmesh.gateway.models.ending import RunSettings
from rollmesh.gateway.models.items import (
    DeadLetterList,
    DeadLetterView,
    GeneratorList,
    PolicyList,
    PolicyView,
    QueueOrder,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.models.live import Overview, SeriesAnswer, Timeline
from rollmesh.gateway.models.process_views import LogTail, ProcessList
from rollmesh.gateway.queue_lists import QueueLists
from rollmesh.gateway.run_facts import run_facts
from rollmesh.gateway.run_processes import RunProcesses
from rollmesh.gateway.trajectory_details import open_tokenizer
from rollmesh.gateway.viewer import Viewer
from rollmesh.store import TrajectoryStore


class LiveReads:
    """``RunReads`` of a run in progress."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller) -> None:
        self._config = config
        self._store = store
        self._poller = poller
        tokenizer, archive = open_tokenizer(config), Archive(config)
        pieces = None if tokenizer is None else tokenizer.pieces
        self._settings = RunSettings(yaml=run_file_text(config))
        self._viewer = Viewer(store, archive, pieces)
        self._lists = BatchLists(archive, pieces)
        self._queue = QueueLists(store, pieces)
        self._processes = RunProcesses(Path(config.folder))

    def about(self) -> About:
        """Return the fixed facts of the run."""
        return run_facts(self._config, text=self._viewer.has_text)

    def settings(self) -> RunSettings:
        """Return the resolved run file."""
        return self._settings

    def overview(self) -> Overview:
        """Return the newest poll."""
        return self._poller.overview()

    def timeline(self) -> Timeline:
        """Return the rollouts in progress or recently ended."""
        return self._poller.timeline()

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        """Stream the events after an id."""
        return self._poller.hub.follow(after)

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        """Return curves."""
        return self._poller.curves.answer(names, points)

    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        """Return one page of the queue."""
        return await self._queue.page(state, cursor, limit, order, descending, preview)

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        """Return one trajectory, from the queue, the dead letters or a batch file."""
        return await self._viewer.detail(trajectory_id, first_token, token_limit)

    async def batches(self) -> BatchList:
        """Return the train steps that have a batch file."""
        return await self._lists.steps()

    async def batch(self, train_step: int, order: BatchOrder, descending: bool, first: int, limit: int) -> BatchPage:
        """Return some trajectories of one batch file."""
        return await self._lists.page(train_step, order, descending, first, limit)

    async def policies(self, limit: int) -> PolicyList:
        """Return announced policies, newest first."""
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
        """Return the live generators."""
        latest = await self._store.policies.latest()
        newest = -1 if latest is None else latest.policy_version
        return GeneratorList(generators=generator_views(await self._store.generators.live(), newest))

    async def dead_letters(self, limit: int) -> DeadLetterList:
        """Return failed trajectories, newest first."""
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

    async def processes(self) -> ProcessList:
        """Return the processes of the run on this machine."""
        return await self._processes.list()

    async def log(self, name: str, lines: int) -> LogTail:
        """Return the last lines of the log of a process."""
        return await self._processes.log(name, lines)
