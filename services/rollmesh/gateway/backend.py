"""Data and actions behind the routes: newest snapshot, store and viewer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence

import rollmesh
from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import check_replicas, check_scale
from rollmesh.errors import Conflict
from rollmesh.gateway.gateway_metrics import GatewayMetrics
from rollmesh.gateway.mesh_poller import MeshPoller
from rollmesh.gateway.mesh_snapshot import finished_evaluations, generator_views
from rollmesh.gateway.models import (
    About,
    DeadLetterList,
    DeadLetterView,
    Done,
    GeneratorList,
    ListState,
    Overview,
    PolicyList,
    PolicyView,
    ScaleRequest,
    SeriesAnswer,
    Timeline,
    TrajectoryDetail,
    TrajectoryPage,
)
from rollmesh.gateway.viewer import Viewer
from rollmesh.runtime.api_errors import NotFound
from rollmesh.runtime.capacity import check_capacity
from rollmesh.scheduling import resolve_schedule
from rollmesh.store import TrajectoryStore
from rollmesh.store.queue_types import DeadLetter


class RunReads:
    """Implementation of ``backend_protocols.Reads``."""

    def __init__(
        self, config: RunConfig, store: TrajectoryStore, poller: MeshPoller, viewer: Viewer, *, text: bool
    ) -> None:
        self._config = config
        self._store = store
        self._poller = poller
        self._viewer = viewer
        self._text = text

    def about(self) -> About:
        config = self._config
        return About(
            run=config.name,
            version=rollmesh.__version__,
            train_steps=config.trainer.train_steps,
            group_size=config.schedule.group_size,
            groups_per_batch=config.schedule.groups_per_batch,
            max_staleness=resolve_schedule(config.schedule, config.trainer.train_steps).max_staleness,
            text=self._text,
            token_for_reads=config.gateway.token_for_reads,
            sample_seconds=config.gateway.sample_seconds,
        )

    def overview(self) -> Overview:
        return self._poller.overview()

    def timeline(self) -> Timeline:
        return self._poller.timeline()

    def events(self, after: int | None) -> AsyncIterator[bytes]:
        return self._poller.hub.follow(after)

    def series(self, names: Sequence[str], points: int) -> SeriesAnswer:
        return self._poller.curves.answer(names, points)

    async def trajectories(self, state: ListState | None, cursor: str | None, limit: int) -> TrajectoryPage:
        return await self._viewer.page(state, cursor, limit)

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
        letters = await self._store.dead_letters.newest(limit)
        total = (await self._store.mesh.counts()).dead_letters
        return DeadLetterList(dead_letters=[_letter_view(letter) for letter in letters], total=total)


class RunActions:
    """Implementation of ``backend_protocols.Actions``."""

    def __init__(self, config: RunConfig, store: TrajectoryStore, metrics: GatewayMetrics) -> None:
        self._config = config
        self._store = store
        self._metrics = metrics

    async def pause(self, paused: bool) -> Done:
        await self._store.settings.set_user_paused(paused)
        self._count("pause" if paused else "resume")
        return Done(done="paused: rollouts in progress are parked and kept" if paused else "resumed")

    async def pin(self, policy_version: int) -> Done:
        await self._check_announced(policy_version)
        await self._store.policies.pin(policy_version)
        self._count("pin")
        return Done(done=f"pinned to policy version {policy_version}")

    async def unpin(self) -> Done:
        await self._store.policies.pin(None)
        self._count("unpin")
        return Done(done="unpinned: generators follow the newest policy version")

    async def roll_back(self, policy_version: int) -> Done:
        await self._check_announced(policy_version)
        request = await self._store.rollbacks.request(policy_version)
        self._count("rollback")
        return Done(
            done=f"rollback to policy version {policy_version} requested: the trainer performs it before its next "
            "step, or at its next start if it has ended",
            request_id=request.request_id,
        )

    async def replay(self, trajectory_id: str) -> Done:
        await self._check_letter(trajectory_id)
        group_id = await self._store.dead_letters.replay(trajectory_id)
        self._count("replay")
        return Done(
            done=f"{trajectory_id} is replayed as group {group_id} once the run has room for it", group_id=group_id
        )

    async def delete_letter(self, trajectory_id: str) -> Done:
        if not await self._store.dead_letters.delete(trajectory_id):
            raise _no_letter(trajectory_id)
        self._count("delete_letter")
        return Done(done=f"dead letter {trajectory_id} is deleted")

    async def scale(self, request: ScaleRequest) -> Done:
        if request.replicas is None:
            check_replicas(request.service, 1)
        else:
            check_scale(self._config, request.service, request.replicas)
            if not request.force:
                asked = await self._store.scaling.requests()
                await asyncio.to_thread(check_capacity, self._config, asked, request.service, request.replicas)
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

    async def _check_letter(self, trajectory_id: str) -> None:
        try:
            await self._store.dead_letters.get(trajectory_id)
        except Conflict as error:
            raise _no_letter(trajectory_id) from error


def _no_letter(trajectory_id: str) -> NotFound:
    return NotFound(
        f"no dead letter {trajectory_id}", field="trajectory_id", hint="GET /api/v1/dead-letters lists them"
    )


def _letter_view(letter: DeadLetter) -> DeadLetterView:
    return DeadLetterView(
        trajectory_id=letter.trajectory_id,
        group_id=letter.group_id,
        reason=letter.reason,
        time=letter.time_seconds,
        attempts=letter.attempts,
        tokens=letter.token_count,
        replayed_as=letter.replayed_as,
    )
