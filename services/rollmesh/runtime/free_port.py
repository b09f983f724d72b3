"""A port for a server that must be told its own before it starts."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from rollmesh.errors import ConfigError

_ABOVE, _BELOW = 16_384, 61_000
"""Where to look: above what is commonly in use, below what is often reserved."""
_TRIES = 200


def free_port() -> int:
    """A loopback port that nobody listens on, and that the kernel gives to nobody who leaves the choice to it.

    A port that the kernel has picked and that is given back until a server binds it seconds later may be somebody
    else's by then: every other server and every connection picks from the same range.
    """
    low, high = _given_out()
    candidates: list[int] = [*range(_ABOVE, low), *range(high + 1, _BELOW)] or list(range(_ABOVE, _BELOW))
    # The system's randomness: processes with one seed would pick the same ports.
    for port in random.SystemRandom().sample(candidates, min(_TRIES, len(candidates))):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise ConfigError(f"none of {_TRIES} loopback ports that were tried is free")


def _given_out() -> tuple[int, int]:
    """First and last port that the kernel picks by itself."""
    try:
        low, high = Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()
    except OSError:
        return 32_768, 60_999
    return int(low), int(high)
