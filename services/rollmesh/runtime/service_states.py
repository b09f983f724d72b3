"""States of the services of a run folder, as their admin ports tell: ready or not, and what they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx

from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.port_security import AdminClient


class ServiceStates:
    """Ready services of a run folder, and the waits of all of them, as their ``/readyz`` tells."""

    def __init__(self, folder: Path, client: AdminClient) -> None:
        self._folder = folder
        self._client = client
        self.ready: Sequence[str] = ()
        """Ready services, ``service-index``."""
        self.waits: Mapping[str, str] = {}
        """What each service waits for, by ``service-index``."""

    async def read(self) -> None:
        """Ask every service once."""
        endpoints = await asyncio.to_thread(read_endpoints, self._folder, starting=True)
        answers = await asyncio.gather(*(self._answer(endpoint) for endpoint in endpoints))
        states = {f"{each.service}-{each.index}": answer for each, answer in zip(endpoints, answers, strict=True)}
        self.ready = [name for name, (ready, _) in states.items() if ready]
        self.waits = {name: wait for name, (_, wait) in states.items() if wait}

    async def _answer(self, endpoint: Endpoint) -> tuple[bool, str]:
        try:
            answer = await self._client.get(endpoint.admin, "/readyz")
            return answer.is_success, str(answer.json()["waits"])
        except httpx.ConnectError as error:
            return False, f"its admin port cannot be reached from here: {_cause(error)}"
        except (httpx.HTTPError, ValueError, KeyError, TypeError):
            return False, ""  # a service that ends, or is too busy to answer


def _cause(error: BaseException) -> str:
    """Return the error of the operating system below an error of the client, which has a text of its own."""
    found: BaseException | None = error
    while found is not None:
        if isinstance(found, OSError) and found.strerror:
            return found.strerror
        inner = found.exceptions[0] if isinstance(found, BaseExceptionGroup) else None
        found = inner or found.__cause__ or found.__context__
    return str(error)
