"""A whole run behind certificates and tokens, its Redis over TLS with a user of its own; nobody else gets in.

What each wrong identity is told: tests/integration/runtime/test_port_security.py and store/test_guarded_redis.py.
"""

import asyncio
import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import pytest

from rollmesh.config.services import SecurityConfig
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.port_security import MISSING_TOKEN, WRONG_TOKEN, PortSecurity
from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import generation_service_pb2_grpc as generation_stubs
from rollmesh.v1 import reward_service_pb2 as reward
from rollmesh.v1 import reward_service_pb2_grpc as reward_stubs

from ..integration.store.test_guarded_redis import PASSWORD, Guarded, guarded_redis
from ..kit.certificates import Authority, Certificate
from .conftest import ENDLESS, interrupted

WAIT_SECONDS = 120.0
"""Seconds for what takes milliseconds: other tests may have every core."""


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[Guarded]:
    (tmp_path / "redis").mkdir()
    with guarded_redis(tmp_path / "redis", ("localhost",)) as found:
        yield found


def test_a_run_trains_behind_certificates_and_tokens_and_refuses_all_others(
    guarded: Guarded,  # before the run, which is then stopped before its Redis
    started,
    wait_until,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    authority, token, renewed = guarded.authority, "the token of this mesh", "the next token"
    mesh, token_file = authority.issue("mesh"), tmp_path / "token"
    token_file.write_text(f"{token}\n")
    line, process = started(
        name="guarded",  # the user of this Redis may touch the keys of that run
        trainer={"train_steps": ENDLESS},
        # At this pace training leaves the cores to the requests of the test.
        generator={"pace": [[1, 0.02]]},
        evaluation={"before_and_after": False},
        agents={"enabled": True},
        gateway={"enabled": True},
        security={"tls": mesh.section(), "token_file": str(token_file)},
        store={"url": guarded.url, "password": PASSWORD, "tls": mesh.section()},
    )
    line.trains(process)
    services = {"trainer", "generator", "reward", "rollout", "gateway", "agents"}
    wait_until(lambda: {e.service for e in read_endpoints(line.folder)} == services, "every service", process)
    endpoints = read_endpoints(line.folder)
    outsider = Authority(tmp_path / "theirs").issue("outsider")
    for endpoint in endpoints:
        admin_port_is_guarded(endpoint, authority, outsider)
    asyncio.run(calls_are_guarded(endpoints, authority))

    def answers(word: str, status: int) -> bool:
        return all(scrape(endpoint, authority, word).status_code == status for endpoint in endpoints)

    for words in (f"{token}\n{renewed}\n", f"{renewed}\n{token}\n"):
        token_file.write_text(words)
        wait_until(lambda: answers(renewed, 200), "the new token", process)
        line.trains(process)
    token_file.write_text(f"{renewed}\n")
    wait_until(lambda: answers(token, 401), "the old one's end", process)
    mesh.replace_by(authority.issue("renewed"))
    new = ssl.PEM_cert_to_DER_cert(mesh.certificate.read_text())
    wait_until(lambda: all(served(e.admin) == new for e in endpoints), "the new certificate", process)
    line.trains(process)
    output = interrupted(process, WAIT_SECONDS)
    assert line.steps == list(range(1, len(line.steps) + 1))
    monkeypatch.setenv("ROLLMESH_STORE__PASSWORD", PASSWORD)
    assert json.loads(line.succeeds("audit", str(line.folder), "--json").stdout)["green"]
    assert line.json_lines("timeline.jsonl")[-1]["generated_token_total"] > 0, "the launcher scrapes guarded ports"
    kept = "".join(file.read_text() for file in [line.folder / "config.yaml", *(line.folder / "logs").glob("*.log")])
    assert not [word for word in (PASSWORD, token, renewed) if word in kept]
    assert "starting it again" not in output, "nothing was restarted for it"
    assert "cancelled_after_grace" not in kept, "no service waits for connections that are merely open"


def scrape(
    endpoint: Endpoint, authority: Authority, token: str | None, own: Certificate | None = None
) -> httpx.Response:
    context = ssl.create_default_context(cafile=str(authority.file))
    if own is not None:
        context.load_cert_chain(own.certificate, own.key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    return httpx.get(f"https://{endpoint.admin}/metrics", headers=headers, verify=context, timeout=WAIT_SECONDS)


def served(address: str) -> bytes:
    """The certificate of a port."""
    host, _, port = address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=WAIT_SECONDS))


def admin_port_is_guarded(endpoint: Endpoint, authority: Authority, outsider: Certificate) -> None:
    for token, message in ((None, MISSING_TOKEN), ("guess", WRONG_TOKEN)):
        refused = scrape(endpoint, authority, token)
        assert (refused.status_code, refused.json()) == (401, {"detail": message}), endpoint.service
    with pytest.raises(httpx.TransportError):
        scrape(endpoint, authority, None, outsider)
    with pytest.raises(httpx.TransportError):
        httpx.get(f"http://{endpoint.admin}/metrics", timeout=WAIT_SECONDS)


async def calls_are_guarded(endpoints: list[Endpoint], authority: Authority) -> None:
    """A call with a certificate of the mesh and a wrong token is refused at either port for calls."""
    section = {"tls": authority.issue("friend").section(), "token": "a guess"}
    guest = PortSecurity.from_config(SecurityConfig.model_validate(section))
    calls = (
        ("reward", lambda c, **k: reward_stubs.RewardServiceStub(c).Score(reward.ScoreRequest(), **k).read()),
        ("generator", lambda c, **k: generation_stubs.GenerationServiceStub(c).Drain(generation.DrainRequest(), **k)),
    )
    for service, call in calls:
        async with create_channel(next(e.grpc for e in endpoints if e.service == service), guest) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(channel, metadata=call_metadata(token=guest.sent_token), timeout=WAIT_SECONDS)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED, refused.value.details()
