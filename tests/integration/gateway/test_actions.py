"""Actions of a client with the token, and refusals of all others."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil

from rollmesh.config import load_run_config
from rollmesh.config.store import StoreConfig
from rollmesh.store import EmbeddedOptions, EmbeddedServer, TrajectoryStore

from ...kit.records import policy_record
from .gateway_scene import DEADLINE_SECONDS, RunningGateway, Scene, until, write_run_file

ACTIONS = [
    ("POST", "api/v1/pause"),
    ("POST", "api/v1/resume"),
    ("POST", "api/v1/unpin"),
    ("POST", "api/v1/policies/0/pin"),
    ("POST", "api/v1/policies/0/rollback"),
    ("POST", "api/v1/dead-letters/e0-0.0/replay"),
    ("DELETE", "api/v1/dead-letters/e0-0.0"),
    ("POST", "api/v1/scale"),
    ("GET", "api/v1/token"),
]


def error_of(answer: httpx.Response) -> dict[str, Any]:
    """The body of an error, which always has the one shape."""
    body = answer.json()
    assert set(body) == {"error", "field", "hint"}, body
    assert body["error"]
    return body


async def test_no_action_is_taken_without_the_token(gateway: RunningGateway, scene: Scene) -> None:
    for header in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic eDp5"}):
        async with gateway.client(headers=header) as outsider:
            for method, path in ACTIONS:
                answer = await outsider.request(method, path, json={"service": "generator", "replicas": 2})
                assert answer.status_code == 401, path
                assert answer.headers["www-authenticate"] == "Bearer"
                assert error_of(answer)["field"] == "Authorization"
            assert (await outsider.get("api/v1/overview")).status_code == 200
    async with gateway.client() as reader:
        text = (await reader.get(f"http://{gateway.endpoint.admin}/metrics")).text
    assert f"rollmesh_gateway_refused_tokens_total {3.0 * len(ACTIONS)}" in text
    assert not (await scene.store.mesh.view()).user_paused
    assert await scene.store.policies.pinned() is None
    assert await scene.store.scaling.requests() == {}


async def test_pause_and_resume_reach_the_queue(client: httpx.AsyncClient, scene: Scene) -> None:
    assert (await client.post("api/v1/pause")).status_code == 200
    assert (await scene.store.mesh.view()).user_paused
    overview = await until(client, "api/v1/overview", lambda body: body["state"] == "paused")
    assert overview["paused_by_person"]
    assert overview["waiting_for"] == "an operator to resume"
    assert (await client.post("api/v1/resume")).status_code == 200
    await until(client, "api/v1/overview", lambda body: body["state"] == "running")


async def test_versions_are_pinned_released_and_rolled_back(client: httpx.AsyncClient, scene: Scene) -> None:
    await scene.store.policies.announce(scene.trainer, policy_record(1))
    assert (await client.post("api/v1/policies/0/pin")).status_code == 200
    await until(client, "api/v1/overview", lambda body: body["pinned_version"] == 0)
    assert [p["pinned"] for p in (await client.get("api/v1/policies")).json()["policies"]] == [False, True]
    assert (await client.post("api/v1/unpin")).status_code == 200
    assert await scene.store.policies.pinned() is None
    done = (await client.post("api/v1/policies/0/rollback")).json()
    request = await scene.store.rollbacks.pending()
    assert request is not None
    assert (request.policy_version, request.request_id) == (0, done["request_id"])
    await until(client, "api/v1/overview", lambda body: body["rollback_to"] == 0)
    for action in ("pin", "rollback"):
        unknown = await client.post(f"api/v1/policies/7/{action}")
        assert unknown.status_code == 404
        assert error_of(unknown)["field"] == "version"


async def test_dead_letters_are_shown_replayed_and_deleted(client: httpx.AsyncClient, scene: Scene) -> None:
    await scene.admit(1)
    await scene.store.trajectories.lease(scene.session, 2)
    await scene.append("e0-0.0", 0, scene.segment("1 + 2 = 3 ,"))
    await scene.store.trajectories.fail(scene.session, [("e0-0.0", "the environment is broken")])
    (letter,) = (await client.get("api/v1/dead-letters")).json()["dead_letters"]
    assert (letter["trajectory_id"], letter["reason"]) == ("e0-0.0", "the environment is broken")
    detail = (await client.get("api/v1/trajectories/e0-0.0")).json()
    assert (detail["found_in"], detail["state"], detail["policy_versions"]) == ("dead_letter", "dead", [0])
    done = (await client.post("api/v1/dead-letters/e0-0.0/replay")).json()
    again = (await client.post("api/v1/dead-letters/e0-0.0/replay")).json()
    assert done["group_id"] == again["group_id"] == "e0-0r1"
    assert await scene.store.leadership.admit_replays(scene.leader, 1) == 1
    assert (await client.get("api/v1/trajectories/e0-0r1.0")).json()["state"] == "pending"
    assert (await client.delete("api/v1/dead-letters/e0-0.0")).status_code == 200
    assert (await client.delete("api/v1/dead-letters/e0-0.0")).status_code == 404
    assert (await client.post("api/v1/dead-letters/e0-0.0/replay")).status_code == 404


async def test_a_scale_request_reaches_the_store_and_a_wrong_one_is_refused(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    answer = await client.post("api/v1/scale", json={"service": "generator", "replicas": 3})
    assert answer.status_code == 200
    assert "no launcher runs" in answer.json()["done"]
    assert await scene.store.scaling.requests() == {"generator": 3}
    for body, status in (
        ({"service": "trainer", "replicas": 2}, 400),
        ({"service": "reward", "replicas": 0}, 409),
        ({"service": "reward"}, 400),
    ):
        wrong = await client.post("api/v1/scale", json=body)
        assert wrong.status_code == status, body
        error_of(wrong)
    assert (await client.post("api/v1/scale", json={"service": "generator", "replicas": None})).status_code == 200
    assert await scene.store.scaling.requests() == {}
    many = {"service": "reward", "replicas": 250}
    refused = await client.post("api/v1/scale", json=many)
    assert refused.status_code == 409 and "8 for each of the " in refused.text
    assert (await client.post("api/v1/scale", json={**many, "force": True})).status_code == 200
    assert await scene.store.scaling.requests() == {"reward": 250}


WRONG = [
    ("GET", "api/v1/trajectories?state=lost", 400, "state"),
    ("GET", "api/v1/trajectories?cursor=nowhere", 400, "cursor"),
    ("GET", "api/v1/trajectories?cursor=pending:1:0", 404, "cursor"),
    ("GET", "api/v1/trajectories?limit=0", 400, "limit"),
    ("GET", "api/v1/trajectories/e0-0.77", 404, "trajectory_id"),
    ("GET", "api/v1/trajectories/..%2f..%2fsecret", 404, None),
    ("GET", "api/v1/series?names=nonsense", 400, "names"),
    ("GET", "api/v1/series?names=loss,,goodput", 400, "names"),
    ("POST", "api/v1/policies/-1/pin", 400, "version"),
    ("POST", "api/v1/policies/999999999999999999999/pin", 400, "version"),
    ("GET", "api/v1/nothing", 404, None),
    ("POST", "api/v1/overview", 405, None),
    ("GET", "page/../app.py", 404, None),
    ("GET", "page/%2e%2e/app.py", 404, None),
]


async def test_a_body_that_is_no_json_is_named_with_the_place_of_the_error(client: httpx.AsyncClient) -> None:
    headers = {"Content-Type": "application/json"}
    answer = await client.post("api/v1/scale", content='{"service": "generator",}', headers=headers)
    assert answer.status_code == 400
    found = error_of(answer)
    assert found["field"] == "body" and found["error"].startswith("the body is not valid JSON: ")
    assert found["error"].endswith("at character 24")


async def test_whatever_is_wrong_has_a_status_and_one_shape(client: httpx.AsyncClient) -> None:
    for method, path, status, field in WRONG:
        answer = await client.request(method, path)
        assert answer.status_code == status, (path, answer.text)
        assert error_of(answer)["field"] == field, path


async def test_a_body_over_the_limit_is_refused_however_it_is_sent(client: httpx.AsyncClient) -> None:
    async def endless() -> Any:
        for _ in range(200):
            yield b"x" * (1 << 16)

    declared = await client.post("api/v1/scale", content=b"x" * ((8 << 20) + 1))
    assert (declared.status_code, error_of(declared)["field"]) == (413, "body")
    chunked = await client.post("api/v1/scale", content=endless())
    assert (chunked.status_code, error_of(chunked)["field"]) == (413, "body")


async def test_every_answer_carries_the_security_headers_and_a_foreign_host_name_is_refused_on_loopback(
    client: httpx.AsyncClient,
) -> None:
    answer = await client.get("api/v1/overview", headers={"Host": "evil.example.org"})
    assert (answer.status_code, error_of(answer)["field"]) == (400, "Host")
    assert (await client.get("api/v1/overview", headers={"Host": "localhost:99"})).status_code == 200
    for path in ("", "api/v1/overview", "api/v1/nothing", "page/icon.svg", "api/v1/docs"):
        headers = (await client.get(path)).headers
        policy_text = headers["content-security-policy"]
        assert "default-src 'self'" in policy_text
        assert "unsafe" not in policy_text
        assert headers["x-content-type-options"] == "nosniff"
        assert "access-control-allow-origin" not in headers
    origin = {"Origin": "https://a.org", "Access-Control-Request-Method": "POST"}
    preflight = await client.options("api/v1/pause", headers=origin)
    assert "access-control-allow-origin" not in preflight.headers


async def test_reads_need_the_token_where_the_run_file_says_so(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    secret = {"ROLLMESH_GATEWAY__TOKEN": "a-token-of-ours", "ROLLMESH_GATEWAY__TOKEN_FOR_READS": "true"}
    gateway = started(run_file, None, **secret)
    assert not (Path(scene.config.folder) / "gateway-token").exists()
    async with gateway.client() as outsider:
        for path in ("about", "overview", "events", "series", "trajectories", "trajectories/x"):
            assert (await outsider.get(f"api/v1/{path}")).status_code == 401, path
        assert (await outsider.get("")).status_code == 200
        header = {"Authorization": "Bearer a-token-of-ours"}
        assert (await outsider.get("api/v1/about", headers=header)).json()["token_for_reads"]


async def test_a_gateway_may_come_before_the_run_and_says_that_there_is_none_yet(
    run_file: Path, started: Callable[..., RunningGateway]
) -> None:
    gateway = started(run_file)
    async with gateway.client() as client:
        answer = await client.get("api/v1/overview")
        assert answer.status_code == 503
        assert "has not been initialised" in error_of(answer)["error"]
        async with client.stream("GET", "api/v1/events") as events:
            assert events.status_code == 200
            assert (await anext(events.aiter_lines())).startswith("retry")
    assert gateway.terminate() == 0


async def test_an_outage_of_redis_is_told_and_survived(
    tmp_path: Path, started: Callable[..., RunningGateway], tokenizer: Any
) -> None:
    own = EmbeddedServer(tmp_path / "redis", EmbeddedOptions(appendfsync="always", maxmemory_bytes=1 << 26))
    own.start()
    try:
        run_file = write_run_file(tmp_path, "outage")
        config = load_run_config(run_file)
        async with await TrajectoryStore.connect(StoreConfig(), run="outage", url=own.url) as store:
            scene = await Scene.begin(store, config, tokenizer)
            await scene.admit(2)
        gateway = started(run_file, own.url)
        token = (Path(config.folder) / "gateway-token").read_text()
        headers = {"Authorization": f"Bearer {token}"}
        async with gateway.client(headers=headers) as client:
            await until(client, "api/v1/overview", lambda body: body.get("groups", {}).get("open") == 2)
            await asyncio.to_thread(own.kill)
            overview = await until(client, "api/v1/overview", lambda body: body["state"] == "unreachable")
            assert overview["groups"]["open"] == 2
            assert overview["age_seconds"] > 0
            refused = await client.post("api/v1/pause")
            assert refused.status_code == 503
            assert "Redis" in error_of(refused)["error"]
            assert (await client.get(f"http://{gateway.endpoint.admin}/healthz")).status_code == 200
            await asyncio.to_thread(own.start)
            await until(client, "api/v1/overview", lambda body: body["state"] != "unreachable")
    finally:
        own.kill()


async def test_below_v1_every_error_has_the_shape_that_openai_clients_know(client: httpx.AsyncClient) -> None:
    evil = {"Host": "evil.example.org"}
    answers = {
        404: await client.get("v1/nothing"),
        413: await client.post("v1/completions", content=b"x" * ((8 << 20) + 1)),
        400: await client.post("v1/completions", json={}, headers=evil),
    }
    for status, answer in answers.items():
        assert answer.status_code == status
        assert set(answer.json()) == {"error"}
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}, answer.text
        assert answer.json()["error"]["type"] == "invalid_request_error"
    assert "call the agents service of the run; agents.enabled=true starts one" in answers[404].text


async def test_bodies_that_arrive_slowly_take_a_bounded_part_of_the_memory(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    gateway = started(run_file)
    address = urlsplit(gateway.url)
    before = psutil.Process(gateway.process.pid).memory_info().rss
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 8388608\r\n\r\n"
    slow = [await asyncio.open_connection(address.hostname, address.port) for _ in range(24)]
    answers: list[asyncio.Task[bytes]] = []
    try:
        for _, writer in slow:  # eight megabytes less one, from each of a crowd that has no token
            writer.write(head + b"x" * (8_388_607))

        async def answer_to(reader: asyncio.StreamReader) -> bytes:
            # Where the machine is slow, the gateway hangs up before all of a refused body has come, and the client's
            # system may throw the answer away with the connection.
            try:
                return await reader.readline()
            except ConnectionError:
                return b""

        answers = [asyncio.create_task(answer_to(reader)) for reader, _ in slow]
        async with asyncio.timeout(DEADLINE_SECONDS):
            told: list[bytes] = []
            for answer in asyncio.as_completed(answers):
                told.append(await answer)
                assert not told[-1] or b" 503 " in told[-1]
                if len(told) >= 16:
                    break
        assert any(told)
        assert psutil.Process(gateway.process.pid).memory_info().rss - before < 160 << 20
        async with gateway.client() as client:
            assert (await client.get("api/v1/about")).status_code == 200
    finally:
        for answer in answers:
            answer.cancel()
        for _, writer in slow:
            writer.close()
    await asyncio.gather(*answers, return_exceptions=True)
