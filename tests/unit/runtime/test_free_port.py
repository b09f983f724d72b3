"""Ports that are picked before their server binds them."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from rollmesh.runtime import addresses

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="this system does not tell its range of ports")
def test_a_port_is_free_and_the_kernel_gives_it_to_no_other_process() -> None:
    low, high = map(int, RANGE.read_text().split())
    for _ in range(5):
        port = addresses.free_port()
        assert not low <= port <= high
        with socket.socket() as server:
            server.bind(("127.0.0.1", port))


def test_processes_with_one_seed_pick_different_ports() -> None:
    picked = set()
    for _ in range(4):
        random.seed(0)
        picked.add(addresses.free_port())
    assert len(picked) > 1


def test_a_port_with_a_listener_is_not_picked(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = addresses.free_port()
    with socket.create_server(("127.0.0.1", taken)):
        monkeypatch.setattr(addresses, "_ABOVE", taken)
        monkeypatch.setattr(addresses, "_ephemeral_range", lambda: (taken + 40, 61_000))
        assert addresses.free_port() in range(taken + 1, taken + 40)
