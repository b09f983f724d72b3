"""Polls of the running services: ready time for the restart limit, and console notes about addresses."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from rollmesh.checkpoints.api_token import page_link
from rollmesh.config import RunConfig
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.port_security import AdminClient

_LABELS = {"gateway": "the run as a page", "agents": "the OpenAI-compatible API"}
_LOST = {"gateway": "its page", "agents": "the OpenAI-compatible API"}


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


class AddressNotes:
    """One console note for each address, and one when the launcher stops restarting a service that has an address."""

    def __init__(self, config: RunConfig, folder: Path, supervisor: Supervisor, note: Callable[[str], None]) -> None:
        self._config = config
        self._folder = folder
        self._supervisor = supervisor
        self._note = note
        self._noted: set[str] = set()

    def update(self) -> None:
        """Read the addresses once and note each new one, such as another port after a restart."""
        for endpoint in read_endpoints(self._folder):
            if endpoint.service in _LABELS:
                # Console notes are often kept in logs: a token of the operator's own is not written there.
                is_linked = endpoint.service == "gateway" and self._config.gateway.token is None
                address = page_link(self._config, endpoint.url) if is_linked else endpoint.url
                self._once(f"{_LABELS[endpoint.service]}: {address}")
        for name, reason in self._supervisor.given_up.items():
            self._once(f"the run continues without {_LOST[name.rpartition('-')[0]]}: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)
