"""Free port for a server that needs its port number before it starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from rollmesh.errors import ConfigError

_ABOVE, _BELOW = 16_384, 61_000
"""Range of candidates: above the ports in common use, below the ports that are often reserved."""
_ATTEMPTS = 200


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
