"""Addresses of the services that score trajectories, behind a name or in the run folder."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime.addresses import host_port
from rollmesh.runtime.endpoints import read_endpoints
from rollmesh.runtime.logging import get_logger

Addresses = Callable[[], Sequence[str]]
"""Function that returns the host:port of every running service; may block."""


def service_addresses(config: RunConfig, section: str, address: str | None, service: str) -> Addresses:
    """Return the function that finds the services of a ``section`` of the run file, by address or in the run folder.

    Raises ConfigError if the run file gives neither an address nor a shared folder.
    """
    if address is not None:
        return ResolvedName(address)
    if not config.network.shared_folder:
        variable = f"ROLLMESH_{section.upper().replace('.', '__')}__ADDRESS"
        raise ConfigError(
            f"{section}.address is missing: without a shared run folder (network.shared_folder=false), set it to the "
            f"host:port of a headless service, for example by {variable}"
        )
    folder = Path(config.folder)
    return lambda: [endpoint.grpc for endpoint in read_endpoints(folder, service)]


class ResolvedName:
    """All addresses behind one ``host:port``; the last known ones while the name cannot be resolved."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._known: list[str] = []
        self._failing = False

    def __call__(self) -> Sequence[str]:
        """Resolve the name; blocks until the system's resolver returns."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._failing:
                get_logger("scoring-client").warning("service_name_unknown", name=self._host, message=str(error))
            self._failing = True
            return self._known
        self._failing = False
        self._known = sorted({host_port(str(entry[4][0]), self._port) for entry in found})
        return self._known
