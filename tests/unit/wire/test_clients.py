"""Clients of the mesh: rotated certificates, and the addresses of reward services."""

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from rollmesh.config.services import SecurityConfig
from rollmesh.errors import ConfigError, EngineError
from rollmesh.runtime.endpoints import ResolvedName, service_addresses
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.types import GeneratorRecord
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_client import GenerationClient

from ...kit.certificates import Authority, Certificate
from ...kit.records import generator_record
from ...kit.run_files import made_run


class Idle(stubs.GenerationServiceServicer):
    async def GetStatus(self, request, context):
        return pb.GetStatusResponse(instance_id="idle")


def guarded(files: Certificate, token_file: Path) -> PortSecurity:
    security = PortSecurity.from_config(
        SecurityConfig.model_validate({"tls": files.section(), "token_file": str(token_file)})
    )
    # Every look is due at once.
    security.tls.clock = security.tokens.clock = lambda: float("inf")
    return security


def record(address: str) -> GeneratorRecord:
    return generator_record("idle", address=address, slot_count=1)


async def test_an_idle_channel_is_replaced_when_certificates_and_token_are_rotated(tmp_path: Path) -> None:
    old, new = Authority(tmp_path / "old"), Authority(tmp_path / "new")
    files = {name: old.issue(name) for name in ("server", "client")}
    token = tmp_path / "token"
    token.write_text("first")
    security = guarded(files["server"], token)
    server = create_server(security)
    stubs.add_GenerationServiceServicer_to_server(Idle(), server)
    address = f"127.0.0.1:{security.bind(server, '127.0.0.1:0')}"
    await server.start()
    try:
        async with GenerationClient(guarded(files["client"], token)) as client:
            assert (await client.status(record(address))).instance_id == "idle"
            for name, certificate in files.items():
                certificate.replace_by(new.issue(name))
            token.write_text("second")
            assert (await client.status(record(address))).instance_id == "idle"
            files["client"].replace_by(old.issue("outdated"))
            with pytest.raises(EngineError, match="its certificate is rejected here"):
                await client.status(record(address))
    finally:
        await server.stop(None)


def answers(*addresses: str) -> list[Any]:
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 7070)) for address in addresses]


def test_every_address_behind_a_name_is_a_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Any] = []

    def resolver(host: str, port: int, **_: Any) -> list[Any]:
        asked.append((host, port))
        return answers("10.0.0.2", "10.0.0.1", "10.0.0.2")

    monkeypatch.setattr(socket, "getaddrinfo", resolver)
    addresses = service_addresses(made_run(tmp_path), "reward", "mesh-reward:7070", "reward")

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

    assert list(service_addresses(made_run(tmp_path), "reward", None, "reward")()) == ["127.0.0.1:5"]


@pytest.mark.parametrize(
    ("section", "variable"),
    [("reward", "ROLLMESH_REWARD__ADDRESS"), ("teachers.math", "ROLLMESH_TEACHERS__MATH__ADDRESS")],
)
def test_pods_must_be_told_where_services_are(tmp_path: Path, section: str, variable: str) -> None:
    with pytest.raises(ConfigError, match=variable):
        service_addresses(made_run(tmp_path, network={"shared_folder": False}), section, None, "reward")


@pytest.mark.parametrize("address", ["mesh-reward", "dns:///mesh-reward:1", "http://mesh:1", "a b:1", ":1"])
def test_an_address_without_host_and_port_is_refused(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="address"):
        made_run(tmp_path, reward={"address": address})
