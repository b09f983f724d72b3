"""A real Prometheus scrapes a guarded admin port with the settings of docs/security.md, and not without them."""

import asyncio
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from rollmesh.config.services import SecurityConfig
from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.port_security import PortSecurity
from rollmesh.runtime.service_host import admin_server

from ...kit.certificates import Authority, Certificate
from .conftest import running_prometheus

DOCUMENT = Path(__file__).parents[3] / "docs" / "security.md"
TOKEN = "the token of this mesh"
WAIT_SECONDS = 150.0
"""Seconds for what takes two or three on an idle machine."""


def documented() -> dict[str, Any]:
    """The scrape job of the document, with its token."""
    (text,) = re.findall(r"```yaml\n(scrape_configs:.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (job,) = yaml.safe_load(text)["scrape_configs"]
    return dict(job)


def jobs(address: str, folder: Path, client: Certificate) -> list[dict[str, Any]]:
    """The documented job in both of its variants, and what must not get through."""
    token_file = folder / "token"
    token_file.write_text(TOKEN)
    target = {"static_configs": [{"targets": [address]}], "scrape_interval": "1s", "scrape_timeout": "1s"}
    with_token = documented() | target
    with_token["authorization"] = {"credentials_file": str(token_file)}
    with_token["tls_config"] = with_token["tls_config"] | {"ca_file": str(client.ca)}
    pair = {"cert_file": str(client.certificate), "key_file": str(client.key)}
    with_certificate = with_token | {"tls_config": with_token["tls_config"] | pair}
    del with_certificate["authorization"]
    neither = {key: value for key, value in with_token.items() if key != "authorization"}
    address_checked = with_token | {"tls_config": {"ca_file": str(client.ca), "server_name": "elsewhere"}}
    named = {"token": with_token, "certificate": with_certificate, "neither": neither, "other name": address_checked}
    return [job | {"job_name": name} for name, job in named.items()]


async def until_seen(url: str, expected: dict[str, tuple[str, str]]) -> None:
    """Wait until the newest scrape of each job is as expected: its health, and a word of its error.

    Not the first one: any scrape may be over its second on a busy machine. A refused client is never admitted.
    """
    deadline = time.monotonic() + WAIT_SECONDS
    seen: dict[str, tuple[str, str]] = {}
    async with httpx.AsyncClient() as client:
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                found = (await client.get(f"{url}/api/v1/targets")).json()["data"]["activeTargets"]
                seen = {target["labels"]["job"]: (target["health"], target["lastError"]) for target in found}
            assert not [job for job, (health, _) in seen.items() if health == "up" and expected[job][0] != "up"]
            if seen.keys() == expected.keys() and all(
                health == wanted and word in error
                for (health, error), (wanted, word) in ((seen[job], expected[job]) for job in expected)
            ):
                return
            await asyncio.sleep(0.1)
    raise AssertionError(f"after {WAIT_SECONDS:g} s, Prometheus says {seen}")


@pytest.mark.timeout(240)
async def test_prometheus_scrapes_guarded_ports_as_documented(tmp_path: Path) -> None:
    authority = Authority(tmp_path / "authority")
    section = {"tls": authority.issue("service").section(), "token": TOKEN}
    security = PortSecurity.from_config(SecurityConfig.model_validate(section))
    client = authority.issue("prometheus")
    async with admin_server(Metrics("reward"), Health(), "127.0.0.1", 0, security) as port:
        with running_prometheus(tmp_path, {"scrape_configs": jobs(f"127.0.0.1:{port}", tmp_path, client)}) as url:
            refused = {"neither": ("down", "401"), "other name": ("down", "elsewhere")}
            await until_seen(url, {"token": ("up", ""), "certificate": ("up", ""), **refused})
