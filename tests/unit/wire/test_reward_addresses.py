"""Discovery of a run's reward services."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError
from rollmesh.wire.reward_client import ResolvedName, reward_addresses


def run_in(folder: Path, **sections: Any) -> RunConfig:
    data = {"name": "pods", "folder": str(folder), "model": {"path": "recipe:countdown"}, **sections}
    return RunConfig.model_validate(data)


def answers(*addresses: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 7070)) for address in addresses]


def test_every_address_behind_a_name_is_a_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def resolver(host: str, port: int, **_: Any) -> list[Any]:
        asked.append((host, port))
        return answers("10.0.0.2", "10.0.0.1", "10.0.0.2")

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    addresses = reward_addresses(run_in(tmp_path, reward={"address": "mesh-reward:7070"}))

    assert list(addresses()) == ["10.0.0.1:7070", "10.0.0.2:7070"]
    assert asked == [("mesh-reward", 7070)]


def test_an_unreachable_name_server_does_not_remove_the_known_services(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers("10.0.0.1"))
    name = ResolvedName("mesh-reward:7070")
    assert list(name()) == ["10.0.0.1:7070"]

    def away(*_: Any, **__: Any) -> list[Any]:
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    assert list(name()) == ["10.0.0.1:7070"]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answers("10.0.0.9"))
    assert list(name()) == ["10.0.0.9:7070"]


def test_the_systems_resolver_is_asked() -> None:
    assert "127.0.0.1:7070" in ResolvedName("localhost:7070")()
    assert list(ResolvedName("[::1]:7070")()) == ["[::1]:7070"]


def test_a_run_on_one_machine_reads_the_files_of_its_run_folder(tmp_path: Path) -> None:
    (tmp_path / "services").mkdir()
    entry = {"service": "reward", "index": 0, "pid": os.getpid(), "grpc": "127.0.0.1:5", "admin": ""}
    (tmp_path / "services" / "reward-0.json").write_text(json.dumps(entry))

    assert list(reward_addresses(run_in(tmp_path))()) == ["127.0.0.1:5"]


def test_pods_must_be_told_where_reward_services_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ROLLMESH_REWARD__ADDRESS"):
        reward_addresses(run_in(tmp_path, network={"shared_folder": False}))


@pytest.mark.parametrize("address", ["mesh-reward", "dns:///mesh-reward:1", "http://mesh:1", "a b:1", ":1"])
def test_an_address_without_host_and_port_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        run_in(tmp_path, reward={"address": address})
