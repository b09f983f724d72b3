"""Addresses of servers, and endpoint files of services."""

import json
import random
import socket
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.runtime import addresses
from rollmesh.runtime.addresses import advertised, bind_host, instance_name
from rollmesh.runtime.endpoints import Endpoint, published_endpoint, read_endpoints
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.service_host import admin_server

from ...kit.run_files import made_run

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def run_with(**network: Any) -> RunConfig:
    return made_run(network=network)


@pytest.mark.parametrize(
    ("network", "bound", "told", "name"),
    [
        ({}, "127.0.0.1", "127.0.0.1:7", "rollout-3"),
        ({"host": "0.0.0.0", "advertise_host": "10.1.2.3", "instance": "a-pod"}, "0.0.0.0", "10.1.2.3:7", "a-pod"),
        ({"host": "::", "advertise_host": "fd00::5"}, "::", "[fd00::5]:7", "rollout-3"),
    ],
)
def test_a_process_binds_to_one_address_and_tells_another(
    network: dict[str, str], bound: str, told: str, name: str
) -> None:
    config = run_with(**network)
    assert (bind_host(config), advertised(config, 7), instance_name(config, "rollout", 3)) == (bound, told, name)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_a_wildcard_is_never_told_to_others(host: str) -> None:
    with pytest.raises(ConfigError, match=r"ROLLMESH_NETWORK__ADVERTISE_HOST"):
        advertised(run_with(host=host), 7070)


async def test_the_admin_port_can_be_chosen_and_a_taken_one_is_a_clear_error() -> None:
    async with admin_server(Metrics("rollout"), Health(), "127.0.0.1") as port:
        with pytest.raises(ConfigError, match=rf"network\.admin_port={port}"):
            async with admin_server(Metrics("rollout"), Health(), "127.0.0.1", port):
                pass


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


def test_a_service_is_found_by_people_and_by_prometheus_while_it_runs(tmp_path: Path) -> None:
    with published_endpoint(
        tmp_path, Endpoint(service="reward", index=1, grpc="127.0.0.1:5", admin="127.0.0.1:6"), run="mine"
    ):
        assert [endpoint.admin for endpoint in read_endpoints(tmp_path)] == ["127.0.0.1:6"]
        (target,) = json.loads((tmp_path / "scrape" / "reward-1.json").read_text())
        assert target == {
            "targets": ["127.0.0.1:6"],
            "labels": {"run": "mine", "service": "reward", "index": "1"},
        }
    assert read_endpoints(tmp_path) == []
    assert not list((tmp_path / "scrape").iterdir())


def test_a_service_leaves_the_files_of_its_successor_alone(tmp_path: Path) -> None:
    with published_endpoint(tmp_path, Endpoint(service="rollout", index=0, grpc="", admin="127.0.0.1:6")):
        endpoint = json.loads((tmp_path / "services" / "rollout-0.json").read_text())
        (tmp_path / "services" / "rollout-0.json").write_text(json.dumps(endpoint | {"pid": endpoint["pid"] + 1}))
    assert (tmp_path / "services" / "rollout-0.json").exists()
    assert (tmp_path / "scrape" / "rollout-0.json").exists()
