"""Addresses of the servers of a process: bind address, advertised address, and a free loopback port."""

import random
import socket
from pathlib import Path

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError

WILDCARDS = frozenset({"0.0.0.0", "::", ""})
_ABOVE, _BELOW = 16_384, 61_000
"""Range of candidates for a free port: above the ports in common use, below the ports that are often reserved."""
_ATTEMPTS = 200


def bind_host(config: RunConfig) -> str:
    """Return the address that the servers of this process bind to."""
    return config.network.host if config.network.host is not None else config.launcher.host


def host_port(host: str, port: int) -> str:
    """Return ``host:port``, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def advertised(config: RunConfig, port: int) -> str:
    """Return host:port under which other processes reach a server of this process.

    Raises ConfigError when the only known host is a wildcard.
    """
    host = config.network.advertise_host or bind_host(config)
    if host in WILDCARDS:
        raise ConfigError(
            f"network.host={host} is a wildcard, which other services cannot connect to: set network.advertise_host, "
            "for example ROLLMESH_NETWORK__ADVERTISE_HOST to the pod's IP"
        )
    return host_port(host, port)


def instance_name(config: RunConfig, service: str, index: int) -> str:
    """Return the name of this process in logs and in the registry."""
    return config.network.instance or f"{service}-{index}"


def free_port() -> int:
    """Return a free loopback port outside the kernel's ephemeral range; raises ConfigError when none is found.

    An ephemeral port may be in use again when the server binds it seconds later, because every other server and every
    connection gets its port from that range.
    """
    low, high = _ephemeral_range()
    candidates: list[int] = [*range(_ABOVE, low), *range(high + 1, _BELOW)] or list(range(_ABOVE, _BELOW))
    # SystemRandom, because processes with the same seed would pick the same ports.
    for port in random.SystemRandom().sample(candidates, min(_ATTEMPTS, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free loopback port among {_ATTEMPTS} candidates: stop processes that listen on many ports")


def _ephemeral_range() -> tuple[int, int]:
    """Return the first and last ephemeral port of the kernel."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(low), int(high)
