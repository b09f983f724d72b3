"""Replicas of a local run follow what people and the autoscaler ask for, look by look.

wanted     the newest wish in the store (``rollmesh scale``, the gateway, ``rollmesh autoscale``), else the run file's
missing    started at once
surplus    stopped one at a time per service, highest index first: SIGTERM, drain, SIGKILL after the grace; its rollouts
           go on elsewhere
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import SCALABLE, check_scale, configured_replicas
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import service_spec
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.store import TrajectoryStore

_FAREWELL_SECONDS = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """What one look changes for one service."""

    start: tuple[int, ...] = ()
    stop: int | None = None


def plan_replicas(wanted: int, present: Collection[int], leaving: Collection[int]) -> ReplicaPlan:
    """Indexes to start and the one to stop; ``present`` are all of the service's processes, ``leaving`` those among
    them that drain already. An index that drains is started again only once it has gone."""
    staying = set(present) - set(leaving)
    surplus = [index for index in staying if index >= wanted]
    return ReplicaPlan(
        start=tuple(index for index in range(wanted) if index not in present),
        stop=max(surplus) if surplus and not leaving else None,
    )


class ReplicaScaler:
    """Starts and stops replicas of one run; used by the launcher that holds the run folder's lock."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        store: TrajectoryStore,
        supervisor: Supervisor,
        note: Callable[[str], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._store = store
        self._supervisor = supervisor
        self._note = note
        self._configured = configured_replicas(config)
        self._wanted = dict(self._configured)
        self._refused: dict[str, str] = {}
        self._services: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}

    async def begin(self, services: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the replicas that are wanted now of these services, and keep to what is wanted from then on."""
        self._environment = environment
        self._services = tuple(service for service in SCALABLE if service in services)
        for service, replicas in (await self._wishes()).items():
            if replicas != self._configured[service]:
                self._note(f"{service}: {replicas} replicas, as asked for (the run file: {self._configured[service]})")
            self._wanted[service] = replicas
        self._carry_out()

    async def reconcile(self) -> None:
        """Look at the wishes once, and start or stop what differs."""
        if not self._services:
            return
        for service, replicas in (await self._wishes()).items():
            if replicas != self._wanted[service]:
                self._note(f"{service}: {self._wanted[service]} -> {replicas} replicas")
                self._wanted[service] = replicas
        self._carry_out()

    async def end(self) -> None:
        """Carry nothing out any more; whoever asks from now on hears that."""
        self._services = ()
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_FAREWELL_SECONDS):
                await self._store.leave_scaling()

    async def _wishes(self) -> dict[str, int]:
        """Replicas wanted now, by service that runs here; a wish that cannot be met is refused once, in words."""
        asked = await self._store.take_scale_requests(f"{os.uname().nodename}:{os.getpid()}")
        wanted = {service: self._configured[service] for service in self._services}
        for service in self._services:
            if service not in asked:
                continue
            try:
                check_scale(self._config, service, asked[service])
            except ConfigError as error:
                if self._refused.get(service) != str(error):
                    self._note(f"not scaled: {error}")
                self._refused[service] = str(error)
                wanted[service] = self._wanted[service]
            else:
                self._refused.pop(service, None)
                wanted[service] = asked[service]
        return wanted

    def _carry_out(self) -> None:
        for service in self._services:
            present, leaving = self._supervisor.indexes(service)
            plan = plan_replicas(self._wanted[service], present, leaving)
            for index in plan.start:
                self._supervisor.start(service_spec(self._config, self._folder, self._environment, service, index))
            if plan.stop is not None:
                gone = self._supervisor.retire(f"{service}-{plan.stop}")
                gone.add_done_callback(partial(self._tidy, f"{service}-{plan.stop}"))

    def _tidy(self, name: str, task: asyncio.Task[None]) -> None:
        """A process that had to be killed leaves its endpoint files behind: nobody shall look for it there."""
        if task.cancelled():
            return
        for folder in ("services", "scrape"):
            with suppress(OSError):
                (self._folder.path / folder / f"{name}.json").unlink(missing_ok=True)
        self._note(f"{name} drained and stopped")
