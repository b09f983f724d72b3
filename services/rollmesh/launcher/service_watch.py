"""Watch of the running services by the launcher: their ready time, and console notes of what they wait for."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import AsyncIterator, Callable

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import ServiceStates
from rollmesh.runtime.health import Waits, waits_text
from rollmesh.runtime.tasks import cancel_and_wait

_POLL_SECONDS = 1.0
_NUMBER = re.compile(r"\d+")


class ServiceWatch:
    """Poller of ``/readyz`` of all services; notes each wait of a service, and of the launcher itself, once."""

    def __init__(self, states: ServiceStates, note: Callable[[str], None]) -> None:
        self._states = states
        self._note = note
        self.own = Waits()
        """What the launcher itself waits for."""
        self.supervisor: Supervisor | None = None
        """Supervisor of the services, once they are there."""
        self._noted: set[str] = set()
        self._last: set[str] = set()

    def text(self) -> str:
        """Return the waits of the services on one line; empty without one."""
        return waits_text(self._states.waits)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Poll within the block."""
        polling = asyncio.create_task(self._poll(), name="watch-services")
        try:
            yield
        finally:
            await cancel_and_wait(polling)

    async def _poll(self) -> None:
        before = time.monotonic()
        while True:
            await self._states.read()
            now = time.monotonic()
            if self.supervisor is not None:
                self.supervisor.count_service(self._states.ready, now - before)
            before = now
            self.note_new()
            await asyncio.sleep(_POLL_SECONDS)

    def note_new(self) -> None:
        """Note the reasons that two polls in a row have seen; one that has ended is noted again when it returns."""
        # Numbers differ from one attempt to the next, and so do the services that meet a failure at one moment.
        lines = {_NUMBER.sub("#", reason): f"waiting: {self.text()}" for reason in self._states.waits.values()}
        if own := self.own.text():
            lines[f"launcher: {_NUMBER.sub('#', own)}"] = f"waiting for {own}"
        seen = lines.keys() & self._last
        for line in sorted({lines[key] for key in seen - self._noted}):
            self._note(line)
        self._noted = (self._noted & lines.keys()) | seen
        self._last = set(lines)
