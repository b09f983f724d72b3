"""The client of the generators across a rotation of certificates and of the token."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollmesh.config.security import SecurityConfig
from rollmesh.errors import EngineError
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.types import GeneratorRecord
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_client import GenerationClient

from ...kit.certificates import Authority, Certificate


class Idle(stubs.GenerationServiceServicer):
    async def GetStatus(self, request, context):
        return pb.GetStatusResponse(instance_id="idle")


def guarded(files: Certificate, token_file: Path) -> PortSecurity:
    security = PortSecurity.from_config(
        SecurityConfig.model_validate({"tls": files.section(), "token_file": str(token_file)})
    )
    assert security.tls is not None
    assert security.tokens is not None
    # Every look is due at once.
    security.tls.clock = security.tokens.clock = lambda: float("inf")
    return security


def record(address: str) -> GeneratorRecord:
    return GeneratorRecord(
        instance_id="idle",
        address=address,
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=1,
        kv_token_capacity=1,
        serving=True,
    )


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
