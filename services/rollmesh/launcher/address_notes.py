"""Console notes about the addresses of the services."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rollmesh.checkpoints.api_token import page_link
from rollmesh.config import RunConfig
from rollmesh.launcher.supervisor import Supervisor
from rollmesh.runtime.endpoints import read_endpoints

_LABELS = {"gateway": "the run as a page", "agents": "the OpenAI-compatible API"}
_LOST = {"gateway": "its page", "agents": "the OpenAI-compatible API"}


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
