"""Console notes about the address of the run's page, or its failure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import read_endpoints

_GATEWAY = "gateway"


class PageNotes:
    """One console note for each address of the gateway, and one when the launcher stops restarting it."""

    def __init__(self, folder: Path, supervisor: Supervisor, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._note = note
        self._noted: set[str] = set()

    def update(self) -> None:
        """Read the addresses once and note each new one, such as another port after a restart."""
        for endpoint in read_endpoints(self._folder, _GATEWAY):
            self._once(f"the run as a page: {endpoint.url}")
        for name, reason in self._supervisor.given_up.items():
            if name.startswith(_GATEWAY):
                self._once(f"the run continues without its page: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._noted:
            self._noted.add(line)
            self._note(line)
