"""Telling a person where the page of the run is, or that there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import read_endpoints

_GATEWAY = "gateway"


class PageNotes:
    """One line for every address that the gateway has, and one when it is given up."""

    def __init__(self, folder: Path, supervisor: Supervisor, note: Callable[[str], None]) -> None:
        self._folder = folder
        self._supervisor = supervisor
        self._note = note
        self._told: set[str] = set()

    def tell(self) -> None:
        """Look once; a restarted gateway on another port is told anew."""
        for endpoint in read_endpoints(self._folder, _GATEWAY):
            self._once(f"the run as a page: {endpoint.url}")
        for name, reason in self._supervisor.given_up.items():
            if name.startswith(_GATEWAY):
                self._once(f"the run goes on without its page: {reason}")

    def _once(self, line: str) -> None:
        if line not in self._told:
            self._told.add(line)
            self._note(line)
