"""Ready time of the services of a run, for the restart limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.port_security import AdminClient


class ServiceTime:
    """Counter of ready time: polls ``/readyz`` of the services and adds the time since the last poll."""

    def __init__(self, folder: Path, client: AdminClient, supervisor: Supervisor) -> None:
        self._folder = folder
        self._client = client
        self._supervisor = supervisor
        self._polled_at = time.monotonic()

    async def count(self) -> None:
        """Poll every service once."""
        endpoints = await asyncio.to_thread(read_endpoints, self._folder)
        ready = await asyncio.gather(*(self._ready(endpoint) for endpoint in endpoints))
        now = time.monotonic()
        names = [f"{e.service}-{e.index}" for e, is_ready in zip(endpoints, ready, strict=True) if is_ready]
        self._supervisor.count_service(names, now - self._polled_at)
        self._polled_at = now

    async def _ready(self, endpoint: Endpoint) -> bool:
        try:
            return (await self._client.get(endpoint.admin, "/readyz")).is_success
        except httpx.HTTPError:
            return False
