"""Time in which the services of a run are ready, for the restart limit."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.port_security import AdminClient


class ServiceTime:
    """Asks the services whether they are ready, and counts the time since it last asked."""

    def __init__(self, folder: Path, client: AdminClient, supervisor: Supervisor) -> None:
        self._folder = folder
        self._client = client
        self._supervisor = supervisor
        self._asked_at = time.monotonic()

    async def count(self) -> None:
        """Ask once."""
        endpoints = await asyncio.to_thread(read_endpoints, self._folder)
        ready = await asyncio.gather(*(self._ready(endpoint) for endpoint in endpoints))
        now = time.monotonic()
        names = [f"{e.service}-{e.index}" for e, is_ready in zip(endpoints, ready, strict=True) if is_ready]
        self._supervisor.count_service(names, now - self._asked_at)
        self._asked_at = now

    async def _ready(self, endpoint: Endpoint) -> bool:
        try:
            return (await self._client.get(endpoint.admin, "/readyz")).is_success
        except httpx.HTTPError:
            return False
