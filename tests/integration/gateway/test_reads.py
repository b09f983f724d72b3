"""Answers of a real gateway process about a real queue."""

import asyncio
import contextlib
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from ...kit.records import policy_record
from ...kit.schema_requests import ask_everything, wrong_methods
from .gateway_scene import DEADLINE_SECONDS, RunningGateway, Scene, until


async def test_the_overview_follows_the_queue(client: httpx.AsyncClient, scene: Scene) -> None:
    await scene.admit(4)
    leased = await scene.store.trajectories.lease(scene.session, 3)
    await scene.complete(leased[0], 1.0)

    def seen(body: Any) -> bool:
        # A look is a few reads one after another, and what waits for the trainer is read before the states are.
        fresh = body["age_seconds"] < 5
        return bool(fresh and body["trajectories"]["scored"] == 1 and body["staleness"]["queue"])

    overview = await until(client, "api/v1/overview", seen)
    assert overview["state"] == "running"
    assert overview["waiting_for"] == "a generator that serves"
    assert overview["trajectories"]["leased"] == 2
    assert overview["trajectories"]["pending"] == 5
    assert overview["groups"] == {"open": 4, "ready": 0, "cut": 0, "aside": 0}
    assert overview["workers"] == 1
    assert overview["staleness"]["queue"] == [{"staleness": 0, "count": 1}]


async def test_a_rollout_on_the_timeline_shows_which_version_wrote_what(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    await scene.admit(2)
    await scene.store.trajectories.lease(scene.session, 2)
    offset = await scene.append("e0-0.0", 0, scene.segment("1 + 2 = 3 ,"))

    def span(body: Any) -> dict[str, Any]:
        return next((span for span in body["rollouts"] if span["id"] == "e0-0.0"), {"tokens": 0, "state": ""})

    await until(client, "api/v1/timeline", lambda body: span(body)["tokens"] == offset)
    await scene.store.policies.announce(scene.trainer, policy_record(1))
    longer = await scene.append("e0-0.0", offset, scene.segment("4 - 1 = 3 !", version=1))
    timeline = await until(client, "api/v1/timeline", lambda body: span(body)["tokens"] == longer)
    first, second = span(timeline)["intervals"]
    assert (first["policy_version"], first["tokens"]) == (0, offset)
    assert (second["policy_version"], second["tokens"]) == (1, longer - offset)
    assert first["start"] <= first["end"] == second["start"] <= second["end"]
    assert (span(timeline)["worker"], span(timeline)["end"]) == ("rollout-0", None)
    assert (timeline["in_flight"], timeline["left_out"]) == (2, 0)
    await scene.store.trajectories.release(scene.session, ["e0-0.0"], "drained")
    timeline = await until(client, "api/v1/timeline", lambda body: span(body)["state"] == "partial")
    assert span(timeline)["end"] is not None


async def test_a_trajectory_is_shown_token_by_token(client: httpx.AsyncClient, scene: Scene) -> None:
    await scene.admit(1)
    await scene.store.trajectories.lease(scene.session, 2)
    first, said, last = scene.segment("1 + 2 = 3 ,"), scene.spoken("> 5"), scene.segment("4 !", kv_min_version=0)
    offset = await scene.append("e0-0.0", 0, first)
    await scene.append("e0-0.0", offset, said, last)
    detail = (await client.get("api/v1/trajectories/e0-0.0")).json()
    assert (detail["found_in"], detail["state"], detail["worker"]) == ("queue", "leased", "rollout-0")
    assert detail["members"] == ["e0-0.0", "e0-0.1"]
    assert detail["prompt_metadata"] == {"target": 3, "index": 0}
    prompt, wrote, environment, again = detail["runs"]
    assert [run["source"] for run in detail["runs"]] == ["prompt", "policy", "environment", "policy"]
    assert "".join(prompt["texts"]) == "1 2 1 > 3 :"
    assert prompt["position"] == -len(prompt["token_ids"])
    assert wrote["position"] == 0
    assert "".join(wrote["texts"]).strip() == "1 + 2 = 3 ,"
    assert np.allclose(wrote["logprobs"], first.behavior_logprobs)
    assert environment["logprobs"] is None
    assert again["kv_min_version"] == 0
    whole = [i for run in detail["runs"] for i in run["token_ids"]]

    paged: list[int] = []
    at: int | None = 0
    while at is not None:
        page = (await client.get("api/v1/trajectories/e0-0.0", params={"first_token": at, "token_limit": 3})).json()
        paged += [i for run in page["runs"] for i in run["token_ids"]]
        at = page["next_token"]
    assert paged == whole
    assert detail["history"] == []
    await scene.store.trajectories.restart(scene.session, ["e0-0.0"])
    await scene.store.trajectories.release(scene.session, ["e0-0.0"], "rested")
    detail = (await client.get("api/v1/trajectories/e0-0.0")).json()
    assert (detail["state"], detail["history"]) == ("pending", ["restarted once by its worker"])


async def test_a_dropped_group_is_not_found_and_the_answer_says_when_it_left(
    client: httpx.AsyncClient, scene: Scene
) -> None:
    await scene.admit(1)
    await scene.store.leadership.evict(scene.leader, ["e0-0"], "stale")
    answer = await client.get("api/v1/trajectories/e0-0.0")
    assert answer.status_code == 404
    assert "left the queue about train step 0" in answer.json()["error"]
    overview = await until(client, "api/v1/overview", lambda body: body["drops"])
    assert overview["drops"] == [{"reason": "stale", "groups": 1, "tokens": 0}]


async def test_the_token_is_made_once_and_is_in_no_log(client: httpx.AsyncClient, scene: Scene) -> None:
    file = Path(scene.config.folder) / "gateway-token"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    token = file.read_text()
    assert (await client.get("api/v1/token")).status_code == 200
    log = (Path(scene.config.folder).parent / "gateway.log").read_text()
    assert token not in log
    assert token not in (Path(scene.config.folder) / "services" / "gateway-0.json").read_text()


async def test_the_documents_name_every_operation_and_load_nothing_from_elsewhere(client: httpx.AsyncClient) -> None:
    document = (await client.get("api/v1/openapi.json")).json()
    page = await client.get("api/v1/docs")
    assert page.headers["content-type"].startswith("text/html")
    for path, operations in document["paths"].items():
        assert path in page.text
        for operation in operations.values():
            assert "HTTPValidationError" not in str(operation["responses"])
            assert operation["description"]
    for schema in document["components"]["schemas"].values():
        undocumented = [name for name, field in schema.get("properties", {}).items() if not field.get("description")]
        assert not undocumented or schema["title"].startswith(("Chat", "Completion")), (schema["title"], undocumented)
    assert "http://" not in page.text
    assert "https://" not in page.text
    assert "<script" not in page.text


async def test_a_run_folder_that_does_not_answer_takes_the_history_and_nothing_else(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    folder = Path(scene.config.folder)
    os.makedirs(folder, exist_ok=True)
    # Opening a pipe without a writer takes as long as a disk that has gone.
    os.mkfifo(folder / "metrics.jsonl")
    await scene.admit(3)
    gateway = started(run_file)
    try:
        async with gateway.client() as client:
            ticks = 0
            async with asyncio.timeout(DEADLINE_SECONDS), client.stream("GET", "api/v1/events") as events:
                async for line in events.aiter_lines():
                    ticks += line.startswith("event: tick")
                    if ticks == 3:
                        break
            overview = (await client.get("api/v1/overview")).json()
            assert (overview["state"], overview["groups"]["open"]) == ("running", 3)
        await gateway.logged("does not answer")
    finally:
        with contextlib.suppress(OSError):  # the reader is gone
            os.close(os.open(folder / "metrics.jsonl", os.O_WRONLY | os.O_NONBLOCK))


async def test_head_of_the_page_the_api_and_the_events_ends_with_the_head(client: httpx.AsyncClient) -> None:
    await until(client, "api/v1/overview", lambda body: True)
    for path in ("", "static/main.js", "api/v1/overview", "api/v1/events", "openapi.json"):
        head, get = await client.head(path), None if path.endswith("events") else await client.get(path)
        assert head.content == b"" and head.status_code == (200 if get is None else get.status_code), path
    assert (await client.head("api/v1/pause")).status_code == 405, "an action needs POST"
    async with httpx.AsyncClient(base_url=client.base_url, timeout=60.0) as unknown:
        assert (await unknown.head("api/v1/config")).status_code == 401


async def test_every_answer_is_one_that_the_document_promises(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    await scene.admit(2)
    await scene.store.trajectories.lease(scene.session, 2)
    await scene.append("e0-0.0", 0, scene.segment("1 + 2 = 3 ,"))
    await scene.store.trajectories.fail(scene.session, [("e0-0.1", "broken")])
    gateway = started(run_file)
    token = (Path(scene.config.folder) / "gateway-token").read_text()
    document = f"{gateway.url}api/v1/openapi.json"
    asked = await asyncio.to_thread(ask_everything, document, token, "/api/v1/")
    assert asked >= 18
    assert await asyncio.to_thread(wrong_methods, document, token, "/") == []
    assert gateway.process.poll() is None
    assert "request_failed" not in gateway.log.read_text()
