"""A whole run behind certificates and tokens, Redis over TLS with a user of its own, and everybody else kept out."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import grpc
import httpx
import numpy as np
import pytest
import redis

from rollmesh.config import RunConfig
from rollmesh.config.services import SecurityConfig
from rollmesh.config.store import StoreConfig, StoreTlsConfig
from rollmesh.errors import RewardUnavailable, RollmeshError, StoreUnavailable
from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.endpoints import AdminClient, Endpoint, read_endpoints
from rollmesh.runtime.port_security import MISSING_TOKEN, OPEN, WRONG_TOKEN, PortSecurity
from rollmesh.store import TrajectoryStore
from rollmesh.types import FinishReason, GenerationCall, GeneratorRecord, Prompt, SamplingParams, Trajectory
from rollmesh.wire.generation_client import GenerationClient
from rollmesh.wire.reward_client import RewardClient

from ..kit.certificates import Authority, Certificate
from .conftest import ENDLESS

WAIT_SECONDS = 120.0
"""Seconds for what takes milliseconds: other tests may have every core."""
USER, PASSWORD = "mesh", "between friends"


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def guarded_redis(authority: Authority, tmp_path: Path) -> Iterator[str]:
    """A Redis that wants client certificates and knows one user, who may touch the keys of one run."""
    # One program under two names: Debian's redis-tools have the second one only.
    binary = shutil.which("redis-server") or shutil.which("redis-check-rdb")
    if binary is None:
        pytest.skip("no redis-server on PATH (apt-get install redis-tools): the embedded one is built without TLS")
    port = free_port()
    folder = tmp_path / "redis"
    folder.mkdir()
    mine = authority.issue("redis")
    (folder / "redis.conf").write_text(
        f"port 0\ntls-port {port}\nbind 127.0.0.1\ndir {folder}\nappendonly yes\nmaxmemory-policy noeviction\n"
        f"tls-cert-file {mine.certificate}\ntls-key-file {mine.key}\ntls-ca-cert-file {mine.ca}\ntls-auth-clients yes\n"
        f'user default off\nuser {USER} on ">{PASSWORD}" ~{{small}}* +@all -@dangerous +info\n'
    )
    with (folder / "redis.log").open("wb") as log:
        command = ["redis-server", str(folder / "redis.conf")]
        process = subprocess.Popen(command, executable=binary, stdout=log, stderr=log)
    yield f"rediss://{USER}@localhost:{port}/0"
    process.kill()
    process.wait()


def identity(certificate: Certificate, token: str | None) -> PortSecurity:
    return PortSecurity.from_config(SecurityConfig.model_validate({"tls": certificate.section(), "token": token}))


def store_config(url: str, certificate: Certificate | None, password: str, ca: Path) -> StoreConfig:
    tls = {"ca": str(ca)}
    if certificate is not None:
        tls |= {"certificate": str(certificate.certificate), "key": str(certificate.key)}
    return StoreConfig.model_validate({"url": url, "password": password, "tls": tls})


def test_a_run_trains_behind_certificates_and_tokens_and_refuses_all_others(
    authority: Authority,
    guarded_redis: str,  # before the run, which is then stopped before its Redis
    started,
    wait_until,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh, token = authority.issue("mesh"), "the token of this mesh"
    token_file = tmp_path / "token"
    token_file.write_text(f"{token}\n")
    line, process = started(
        trainer={"train_steps": ENDLESS},
        # At this pace training leaves the cores to the requests of the test.
        generator={"pace": [[1, 0.02]]},
        evaluation={"before_and_after": False},
        agents={"enabled": True},
        gateway={"enabled": True},
        security={"tls": mesh.section(), "token_file": str(token_file)},
        store={
            "url": guarded_redis,
            "password": PASSWORD,
            "tls": {"ca": str(mesh.ca), "certificate": str(mesh.certificate), "key": str(mesh.key)},
        },
    )
    wait_until(lambda: len(line.json_lines("metrics.jsonl")) >= 1, "a train step", process)
    services = {"trainer", "generator", "reward", "rollout", "gateway", "agents"}
    wait_until(lambda: {e.service for e in read_endpoints(line.folder)} == services, "every service", process)
    endpoints = read_endpoints(line.folder)
    asyncio.run(nobody_else_gets_in(endpoints, authority, mesh, token, tmp_path))
    asyncio.run(redis_keeps_strangers_out(guarded_redis, authority, mesh, tmp_path))

    def trains_on() -> None:
        seen = len(line.json_lines("metrics.jsonl"))
        wait_until(lambda: len(line.json_lines("metrics.jsonl")) > seen, "another train step", process)

    def accepted(word: str) -> bool:
        return all(scrape(endpoint, word, authority.file) == 200 for endpoint in endpoints)

    def refused(word: str) -> bool:
        return all(scrape(endpoint, word, authority.file) == 401 for endpoint in endpoints)

    renewed = "the next token"
    for words in (f"{token}\n{renewed}\n", f"{renewed}\n{token}\n"):
        token_file.write_text(words)
        wait_until(lambda: accepted(renewed), "the new token", process)
        trains_on()
    token_file.write_text(f"{renewed}\n")
    wait_until(lambda: refused(token), "the old one's end", process)
    mesh.replace_by(authority.issue("renewed"))
    new = ssl.PEM_cert_to_DER_cert(mesh.certificate.read_text())
    wait_until(lambda: all(served(e.admin) == new for e in endpoints), "the new certificate", process)
    trains_on()
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=WAIT_SECONDS)
    assert process.returncode == 130, output
    steps = [step["train_step"] for step in line.json_lines("metrics.jsonl")]
    assert len(steps) >= 4
    assert steps == list(range(1, len(steps) + 1))
    monkeypatch.setenv("ROLLMESH_STORE__PASSWORD", PASSWORD)
    audit = line.run("audit", str(line.folder), "--json")
    assert audit.returncode == 0, audit.stdout + audit.stderr
    assert json.loads(audit.stdout)["green"]
    assert line.json_lines("timeline.jsonl")[-1]["generated_token_total"] > 0, "the launcher scrapes guarded ports"
    kept = "".join(file.read_text() for file in [line.folder / "config.yaml", *(line.folder / "logs").glob("*.log")])
    assert PASSWORD not in kept
    assert token not in kept
    assert renewed not in kept
    assert "starting it again" not in output, "nothing was restarted for it"
    assert "cancelled_after_grace" not in kept, "no service waits for connections that are merely open"


def scrape(endpoint: Endpoint, token: str, ca: Path) -> int:
    context = ssl.create_default_context(cafile=str(ca))
    answer = httpx.get(
        f"https://{endpoint.admin}/metrics",
        headers={"Authorization": f"Bearer {token}"},
        verify=context,
        timeout=WAIT_SECONDS,
    )
    return answer.status_code


def served(address: str) -> bytes:
    """The certificate of a port."""
    host, _, port = address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=WAIT_SECONDS))


async def nobody_else_gets_in(
    endpoints: list[Endpoint], authority: Authority, mesh: Certificate, token: str, tmp_path: Path
) -> None:
    outsider = Authority(tmp_path / "theirs").issue("outsider")
    expired = authority.issue("expired", expired=True)
    friend = identity(authority.issue("friend"), token)
    for endpoint in endpoints:
        async with AdminClient(friend, timeout_seconds=WAIT_SECONDS) as client:
            assert f"rollmesh_{endpoint.service}_build_info" in (await client.get(endpoint.admin, "/metrics")).text
        await admin_port_refuses(endpoint, authority, outsider, expired)
    intruders = {
        "outsider": (shown(friend, outsider, mesh.ca), "it may reject the client certificate"),
        "expired": (shown(friend, expired, mesh.ca), "it may reject the client certificate"),
        "none": (shown(friend, None, mesh.ca), "it may reject the client certificate"),
        "plain": (OPEN, "it may require TLS, and security.tls is not set here"),
        "no token": (identity(authority.issue("quiet"), None), MISSING_TOKEN),
        "wrong token": (identity(authority.issue("guessing"), "a guess"), WRONG_TOKEN),
    }
    reward = next(e.grpc for e in endpoints if e.service == "reward")
    generator = next(e.grpc for e in endpoints if e.service == "generator")
    for name, (who, message) in intruders.items():
        refusal = await refusal_of_reward(reward, who)
        assert message in refusal, name
        assert token not in refusal, name
        with pytest.raises(RollmeshError, match=message):
            await generate(generator, who)
    assert (await score(reward, friend)).kind


def shown(friend: PortSecurity, certificate: Certificate | None, ca: Path) -> PortSecurity:
    """The right token with another certificate, or without one."""
    security = PortSecurity(friend.tls, friend.tokens)
    pair = (None, None) if certificate is None else (certificate.key.read_bytes(), certificate.certificate.read_bytes())

    class Shown:
        server_name = "rollmesh"
        material = object()

        def channel_credentials(self) -> grpc.ChannelCredentials:
            return grpc.ssl_channel_credentials(ca.read_bytes(), *pair)

    security.tls = Shown()  # type: ignore[assignment]
    return security


async def admin_port_refuses(
    endpoint: Endpoint, authority: Authority, outsider: Certificate, expired: Certificate
) -> None:
    anonymous = ssl.create_default_context(cafile=str(authority.file))
    async with httpx.AsyncClient(verify=anonymous, timeout=WAIT_SECONDS) as client:
        url = f"https://{endpoint.admin}"
        assert (await client.get(f"{url}/healthz")).status_code == 200
        assert (await client.get(f"{url}/metrics")).json() == {"detail": MISSING_TOKEN}
        guess = await client.get(f"{url}/metrics", headers={"Authorization": "Bearer guess"})
        assert (guess.status_code, guess.json()) == (401, {"detail": WRONG_TOKEN})
    for certificate in (outsider, expired):
        context = ssl.create_default_context(cafile=str(authority.file))
        context.load_cert_chain(certificate.certificate, certificate.key)
        async with httpx.AsyncClient(verify=context, timeout=WAIT_SECONDS) as client:
            with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
                await client.get(f"https://{endpoint.admin}/metrics")
    async with httpx.AsyncClient(timeout=WAIT_SECONDS) as client:
        with pytest.raises((httpx.ReadError, httpx.ConnectError, httpx.RemoteProtocolError)):
            await client.get(f"http://{endpoint.admin}/metrics")


async def refusal_of_reward(address: str, who: PortSecurity) -> str:
    """Return the reward service's reason for a refusal.

    The client retries a refused connection until the deadline of the call, so the first deadlines are short. On a busy
    machine the first attempt may exceed its deadline; its error then names no reason.
    """
    for seconds in (1.0, 8.0, WAIT_SECONDS):
        with pytest.raises(RewardUnavailable) as refused:
            await score(address, who, seconds)
        if "did not answer" not in str(refused.value):
            break
    return str(refused.value)


async def score(address: str, who: PortSecurity, seconds: float = WAIT_SECONDS):
    prompt = Prompt(prompt_id="p", token_ids=np.array([1], np.int32), verifier="")
    trajectory = Trajectory(
        trajectory_id="probe", group_id="g", member_index=0, prompt=prompt, finish_reason=FinishReason.STOP
    )
    config = RunConfig.model_validate({"name": "probe", "folder": "unused", "model": {"path": "unused"}})
    async with RewardClient(config, addresses=lambda: [address], security=who, deadline_seconds=seconds) as client:
        (outcome,) = await client.score([trajectory])
        return outcome


async def generate(address: str, who: PortSecurity) -> None:
    record = GeneratorRecord(
        instance_id="probe",
        address=address,
        policy_version=0,
        running_count=0,
        waiting_count=0,
        slot_count=1,
        kv_token_capacity=1,
        serving=True,
    )
    call = GenerationCall(
        trajectory_id="probe",
        context_ids=np.array([1], np.int32),
        prompt_token_count=1,
        max_new_token_count=1,
        sampling=SamplingParams(temperature=1.0, seed=0, stop_token_ids=()),
        chunk_token_count=1,
    )
    async with GenerationClient(who) as client:
        async for _ in client.generate(record, call):
            raise AssertionError("an outsider was served")


async def redis_keeps_strangers_out(url: str, authority: Authority, mesh: Certificate, tmp_path: Path) -> None:
    other = Authority(tmp_path / "others")
    cases = [
        (store_config(url, mesh, "a guess", mesh.ca), "credentials"),
        (store_config(url, None, PASSWORD, mesh.ca), "rejects the client certificate"),
        (store_config(url, other.issue("x"), PASSWORD, mesh.ca), "rejects the client certificate"),
        (store_config(url, authority.issue("old", expired=True), PASSWORD, mesh.ca), "rejects the client certificate"),
        (store_config(url, mesh, PASSWORD, other.file), "the certificate of Redis is not trusted"),
    ]
    for config, message in cases:
        with pytest.raises(StoreUnavailable, match=message) as refused:
            await TrajectoryStore.connect(config, "small", retry_seconds=WAIT_SECONDS)
        assert PASSWORD not in str(refused.value)
    # The user of this run cannot touch the keys of another one.
    context = StoreTlsConfig(ca=str(mesh.ca), certificate=str(mesh.certificate), key=str(mesh.key))
    with redis.Redis.from_url(
        url, password=PASSWORD, ssl_ca_certs=context.ca, ssl_certfile=context.certificate, ssl_keyfile=context.key
    ) as client:
        with pytest.raises(redis.exceptions.NoPermissionError):
            client.set("{other}:x", "1")
