"""Scaling of a local run to the replica counts that operators request.

wanted     the newest request in the store (``rollmesh scale``, the gateway), or the run file
missing    start immediately
surplus    stop one at a time per service, highest index first: SIGTERM, drain, SIGKILL after the grace period; other
           replicas continue their rollouts
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial

from rollmesh.config import RunConfig
from rollmesh.config.replica_bounds import SCALABLE, check_scale, configured_replicas
from rollmesh.errors import ConfigError, StoreUnavailable
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import service_spec
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.store.operator_settings import Scaling

_LEAVE_SECONDS = 2.0


def plan_replicas(wanted: int, present: Collection[int], leaving: Collection[int]) -> tuple[list[int], int | None]:
    """Plan one round of one service: return the indexes to start, and the one to stop.

    ``present`` are the indexes of all processes of the service; ``leaving`` are those that drain already. An index that
    drains restarts only after its process has exited.
    """
    surplus = [index for index in set(present) - set(leaving) if index >= wanted]
    missing = [index for index in range(wanted) if index not in present]
    return missing, max(surplus) if surplus and not leaving else None


class ReplicaScaler:
    """Starts and stops of the replicas of one run, for the launcher that holds the run folder's lock."""

    def __init__(
        self,
        config: RunConfig,
        folder: RunFolder,
        scaling: Scaling | None,
        supervisor: Supervisor,
        note: Callable[[str], None],
    ) -> None:
        """Without ``scaling`` the replicas of the run file are fixed."""
        self._config = config
        self._folder = folder
        self._scaling = scaling
        self._supervisor = supervisor
        self._note = note
        self._configured = configured_replicas(config)
        self._wanted = dict(self._configured)
        self._refused: dict[str, str] = {}
        self._services: tuple[str, ...] = ()
        self._environment: Mapping[str, str] = {}

    async def begin(self, services: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start the wanted replicas of these services; ``reconcile`` adjusts them from then on."""
        self._environment = environment
        self._services = tuple(service for service in SCALABLE if service in services)
        for service, replicas in (await self._requests()).items():
            if replicas != self._configured[service]:
                self._note(f"{service}: {replicas} replicas, as requested (the run file: {self._configured[service]})")
            self._wanted[service] = replicas
        self._apply()

    async def reconcile(self) -> None:
        """Read the requests once, and start or stop the replicas that differ."""
        if not self._services:
            return
        for service, replicas in (await self._requests()).items():
            if replicas != self._wanted[service]:
                self._note(f"{service}: {self._wanted[service]} -> {replicas} replicas")
                self._wanted[service] = replicas
        self._apply()

    async def end(self) -> None:
        """Stop scaling, and record in the store that no launcher applies requests any more."""
        self._services = ()
        if self._scaling is None:
            return
        with suppress(StoreUnavailable, TimeoutError):
            async with asyncio.timeout(_LEAVE_SECONDS):
                await self._scaling.leave()

    async def _requests(self) -> dict[str, int]:
        """Read the wanted replicas by local service; note each impossible request once and ignore it."""
        launcher = f"{os.uname().nodename}:{os.getpid()}"
        requests = {} if self._scaling is None else await self._scaling.take(launcher)
        wanted = {service: self._configured[service] for service in self._services}
        for service in self._services:
            if service not in requests:
                continue
            try:
                check_scale(self._config, service, requests[service])
            except ConfigError as error:
                if self._refused.get(service) != str(error):
                    self._note(f"not scaled: {error}")
                self._refused[service] = str(error)
                wanted[service] = self._wanted[service]
            else:
                self._refused.pop(service, None)
                wanted[service] = requests[service]
        return wanted

    def _apply(self) -> None:
        for service in self._services:
            present, leaving = self._supervisor.indexes(service)
            missing, surplus = plan_replicas(self._wanted[service], present, leaving)
            for index in missing:
                self._supervisor.start(service_spec(self._config, self._folder, self._environment, service, index))
            if surplus is not None:
                name = f"{service}-{surplus}"
                self._supervisor.retire(name).add_done_callback(partial(self._tidy, name))

    def _tidy(self, name: str, task: asyncio.Task[None]) -> None:
        """Remove the endpoint files that a killed process leaves, so that no client connects to it."""
        if task.cancelled():
            return
        for folder in ("services", "scrape"):
            with suppress(OSError):
                (self._folder.path / folder / f"{name}.json").unlink(missing_ok=True)
        self._note(f"{name} drained and stopped")
