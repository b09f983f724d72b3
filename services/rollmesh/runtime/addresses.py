"""Bind address and advertised address of a service."""

from __future__ import annotations

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError

WILDCARDS = frozenset({"0.0.0.0", "::", ""})


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
