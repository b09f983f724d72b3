"""Where the reward services of a run are: by a DNS name, or by the files of a shared run folder."""

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
"""host:port of every service there is now; may block."""


def reward_addresses(config: RunConfig) -> Addresses:
    """How this run's reward services are found.

    Raises ConfigError when there is no way to find them.
    """
    if config.reward.address is not None:
        return ResolvedName(config.reward.address)
    if not config.network.shared_folder:
        raise ConfigError(
            "reward.address is missing: services that share no run folder (network.shared_folder=false) find reward "
            "services by the host:port of a headless service, for example by ROLLMESH_REWARD__ADDRESS"
        )
    folder = Path(config.folder)
    return lambda: [endpoint.grpc for endpoint in read_endpoints(folder, "reward")]


class ResolvedName:
    """All addresses behind one ``host:port``; while the name cannot be resolved, those known before."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._known: list[str] = []
        self._failing = False

    def __call__(self) -> Sequence[str]:
        """Look the name up; blocks as long as the system's resolver does."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._failing:
                get_logger("reward-client").warning("reward_name_unknown", name=self._host, message=str(error))
            self._failing = True
            return self._known
        self._failing = False
        self._known = sorted({host_port(str(entry[4][0]), self._port) for entry in found})
        return self._known
