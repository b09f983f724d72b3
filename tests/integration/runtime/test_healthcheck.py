"""The health check of a container against the real admin port."""

from __future__ import annotations

import ast
import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from rollmesh.config.services import SecurityConfig
from rollmesh.runtime.health import Health
from rollmesh.runtime.healthcheck import check, main
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.service_host import admin_server

from ...kit.certificates import Authority


async def test_a_service_is_healthy_while_its_loops_live_whether_ready_or_not() -> None:
    health = Health()
    health.set_ready(False, "no policy yet")
    async with admin_server(Metrics("generator"), health, "127.0.0.1") as port:
        assert await asyncio.to_thread(check, port) == ""
        health.watch("loop", deadline_seconds=-1.0)
        assert "loop" in await asyncio.to_thread(check, port)
    assert "refused" in await asyncio.to_thread(check, port)


def test_a_container_without_a_known_admin_port_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLMESH_NETWORK__ADMIN_PORT", "0")
    with pytest.raises(SystemExit, match="ROLLMESH_NETWORK__ADMIN_PORT is not set"):
        main()


def test_the_check_loads_nothing_but_the_standard_library() -> None:
    script = "import sys, rollmesh.runtime.healthcheck as h; print(sorted({m.split('.')[0] for m in sys.modules}))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert not {"grpc", "fastapi", "pydantic", "numpy", "httpx"} & set(ast.literal_eval(out))


async def test_a_port_with_certificates_is_asked_over_tls(tmp_path: Path) -> None:
    tls = Authority(tmp_path / "ours").issue("server").section()
    security = PortSecurity.from_config(SecurityConfig.model_validate({"tls": tls}))
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1", 0, security) as port:
        assert await asyncio.to_thread(check, port) == ""
