"""Reads of a live run: the newest poll of the mesh, the queue and the batch files."""

from __future__ import annotations

import asyncio
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.errors import Conflict
from rollmesh.gateway.curves import names_of
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
from rollmesh.gateway.read_routes import RunReads
from rollmesh.gateway.trajectory_views import trajectory_detail
from rollmesh.runtime.request_guard import NotFound
from rollmesh.store import TrajectoryStore
from rollmesh.store.inspection import InspectedTrajectory
from rollmesh.types import Trajectory, TrajectoryState


class LiveReads(RunReads):
    """Reads of a run in progress."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller) -> None:
        super().__init__(config, Path(config.folder))
        self._store = store
        self._poller = poller
        self._queue = QueueLists(store, self._pieces)
        self.hub = poller.hub

    async def overview(self) -> Overview:
        return self._poller.overview()

    async def timeline(self) -> Timeline:
        return self._poller.timeline()

    async def series(self, names: str = "", points: int = 300) -> SeriesAnswer:
        return self._poller.curves.answer(names_of(names), points)

    async def trajectories(
        self,
        state: str | None = None,
        cursor: str | None = None,
        limit: int = 100,
        order: QueueOrder = "queue",
        descending: bool = False,
        preview: bool = False,
    ) -> TrajectoryPage:
        return await self._queue.page(state, cursor, limit, order, descending, preview)

    async def trajectory(self, trajectory_id: str, first_token: int = 0, token_limit: int = 4096) -> TrajectoryDetail:
        part = first_token, token_limit
        inspected = await self._store.inspection.inspect(trajectory_id)
        # The tokens of a dead one are in its letter.
        if inspected is not None and inspected.trajectory is not None and inspected.mark.state != TrajectoryState.DEAD:
            return await self._in_queue(inspected, inspected.trajectory, *part)
        try:
            letter = await self._store.dead_letters.get(trajectory_id)
        except Conflict:
            letter = None
        if letter is not None and letter.trajectory is not None:
            detail = await self._detail(letter.trajectory, *part)
            return detail.model_copy(update={"state": TrajectoryState.DEAD.value, "found_in": "dead_letter"})
        left_at = await self._store.inspection.gone_at(trajectory_id.rpartition(".")[0])
        trained = (await self._store.training.state()).trained_step
        if (found := await self._in_batches(trajectory_id, left_at, trained, *part)) is not None:
            return found
        if left_at is None:
            raise NotFound(
                f"no trajectory {trajectory_id} in the queue, in a batch file or among the dead letters",
                field="trajectory_id",
                hint="ids are <group>.<member>, as listed by /api/v1/trajectories",
            )
        raise NotFound(
            f"the group of {trajectory_id} left the queue about train step {left_at}, and no batch file here has it",
            field="trajectory_id",
            hint="it was dropped (overview: drops), or the checkpoint folder is not on this machine",
        )

    async def _in_queue(
        self, inspected: InspectedTrajectory, trajectory: Trajectory, first_token: int, token_limit: int
    ) -> TrajectoryDetail:
        mark = inspected.mark
        workers = await self._store.inspection.workers() if mark.session else {}
        detail = await self._detail(trajectory, first_token, token_limit)
        members = [f"{trajectory.group_id}.{member}" for member in range(inspected.member_count)]
        marks = await self._store.inspection.marks(members)
        return detail.model_copy(
            update={
                "members": members,
                "member_rewards": tuple(None if each is None else each.reward for each in marks),
                "state": mark.state,
                "train_step": mark.train_step,
                "worker": workers.get(mark.session, ""),
                "history": list(inspected.history.sentences()),
            }
        )

    async def _detail(self, trajectory: Trajectory, first_token: int, token_limit: int) -> TrajectoryDetail:
        # Decode in a thread: the text of thousands of tokens takes a while.
        return await asyncio.to_thread(trajectory_detail, trajectory, first_token, token_limit, self._pieces)

    async def policies(self, limit: int = 100) -> PolicyList:
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

    async def dead_letters(self, limit: int = 100) -> DeadLetterList:
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
