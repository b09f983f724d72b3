"""Reads of a live run: the newest poll of the mesh, the queue and the batch files."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.mesh_snapshot import finished_evaluations, generator_views
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
from rollmesh.gateway.queue_lists import QueueLists
from rollmesh.gateway.run_reads import RunReads
from rollmesh.gateway.trajectory_views import Viewer
from rollmesh.store import TrajectoryStore


class LiveReads(RunReads):
    """Reads of a run in progress."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller) -> None:
        super().__init__(config, Path(config.folder))
        self._store = store
        self._poller = poller
        self._viewer = Viewer(store, self._archive, self._pieces)
        self._queue = QueueLists(store, self._pieces)

    def overview(self) -> Overview:
        return self._poller.overview()

    def timeline(self) -> Timeline:
        return self._poller.timeline()

    def follow(self, after: int | None) -> AsyncIterator[bytes]:
        return self._poller.hub.follow(after)

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        return self._poller.curves.answer(names, points)

    async def trajectories(
        self, state: str | None, cursor: str | None, limit: int, order: QueueOrder, descending: bool, preview: bool
    ) -> TrajectoryPage:
        return await self._queue.page(state, cursor, limit, order, descending, preview)

    async def trajectory(self, trajectory_id: str, first_token: int, token_limit: int) -> TrajectoryDetail:
        return await self._viewer.detail(trajectory_id, first_token, token_limit)

    async def policies(self, limit: int) -> PolicyList:
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
        latest = await self._store.policies.latest()
        newest = -1 if latest is None else latest.policy_version
        return GeneratorList(generators=generator_views(await self._store.generators.live(), newest))

    async def dead_letters(self, limit: int) -> DeadLetterList:
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
