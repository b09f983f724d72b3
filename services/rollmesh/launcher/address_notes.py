"""Console notes about the addresses of the page and of the OpenAI-compatible API, or about their failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import read_endpoints

_LABELS = {"gateway": "the run as a page", "agents": "the OpenAI-compatible API"}
_LOST = {"gateway": "its page", "agents": "the OpenAI-compatible API"}


class AddressNotes:
    """One console note for each address, and one when the launcher stops restarting a service that has an address."""

    def __init__(self, folder: Path, supervisor: Supervisor, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._note = note
        self._noted: set[str] = set()

    def update(self) -> None:
        """Read the addresses once and note each new one, such as another port after a restart."""
        for endpoint in read_endpoints(self._folder):
            if endpoint.service in _LABELS:
                self._once(f"{_LABELS[endpoint.service]}: {endpoint.url}")
        for name, reason in self._supervisor.given_up.items():
            self._once(f"the run continues without {_LOST[name.rpartition('-')[0]]}: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)
