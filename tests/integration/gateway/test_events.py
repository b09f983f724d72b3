"""Live events: what clients receive, however slowly they read, and how many there may be."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import psutil
import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from rollmesh.gateway.events import _KEPT_TICKS
from rollmesh.runtime.http_server import http_server, listen_with_timeout

from .gateway_scene import DEADLINE_SECONDS, RunningGateway, Scene, until

Event = tuple[str, int, Any]


async def events_of(client: httpx.AsyncClient, after: int | None = None) -> AsyncIterator[Event]:
    """Kind, id and data of every event."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    async with client.stream("GET", "api/v1/events", headers=headers) as answer:
        assert answer.status_code == 200, await answer.aread()
        assert answer.headers["content-type"].startswith("text/event-stream")
        kind, identity = "", -1
        async for line in answer.aiter_lines():
            name, _, value = line.partition(": ")
            if name == "event":
                kind = value
            elif name == "id":
                identity = int(value)
            elif name == "data":
                yield kind, identity, json.loads(value)


async def first(stream: AsyncIterator[Event], count: int) -> list[Event]:
    found = []
    async with asyncio.timeout(DEADLINE_SECONDS):
        async for event in stream:
            found.append(event)
            if len(found) == count:
                break
    await stream.aclose()  # type: ignore[attr-defined]
    return found


async def test_clients_follow_the_run_and_come_back_where_they_were(client: httpx.AsyncClient, scene: Scene) -> None:
    await scene.admit(3)
    both = await asyncio.gather(first(events_of(client), 4), first(events_of(client), 4))
    for events in both:
        assert [kind for kind, _, _ in events] == ["snapshot", "tick", "tick", "tick"]
        ids = [identity for _, identity, _ in events]
        assert ids == list(range(ids[0], ids[0] + 4))
    # A client that is away for longer than a few ticks has missed them, and its next attempt may be quicker.
    for _ in range(20):
        last = (await first(events_of(client), 2))[-1][1]
        ((kind, identity, _),) = await first(events_of(client, after=last), 1)
        if kind == "tick":
            break
        assert identity > last + _KEPT_TICKS
    assert (kind, identity) == ("tick", last + 1)


async def test_too_many_clients_are_told_so(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    gateway = started(run_file, None, ROLLMESH_GATEWAY__MOST_EVENT_CLIENTS="1")
    async with gateway.client() as client:
        await until(client, "api/v1/overview", lambda body: "state" in body)
        stream = events_of(client)
        await anext(stream)
        refused = await client.get("api/v1/events")
        assert (refused.status_code, refused.json()["hint"]) == (
            503,
            "close a page, or raise gateway.most_event_clients",
        )
        await stream.aclose()  # type: ignore[attr-defined]
        await until(client, "api/v1/overview", lambda body: "state" in body)
        async with asyncio.timeout(DEADLINE_SECONDS):
            while (await client.get("api/v1/about")).status_code == 200:
                async with client.stream("GET", "api/v1/events") as again:
                    if again.status_code == 200:
                        break


async def test_a_client_that_never_reads_costs_nothing_and_delays_no_other(
    run_file: Path, scene: Scene, started: Callable[..., RunningGateway]
) -> None:
    await scene.admit(4)
    gateway = started(run_file)
    address = urlsplit(gateway.url)
    assert address.hostname is not None and address.port is not None
    deaf = [socket.create_connection((address.hostname, address.port)) for _ in range(8)]
    for connection in deaf:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(b"GET /api/v1/events HTTP/1.1\r\nHost: localhost\r\n\r\n")
    try:
        async with gateway.client() as client:
            await first(events_of(client), 10)
            before = psutil.Process(gateway.process.pid).memory_info().rss
            heard = await first(events_of(client), 40)
            assert [kind for kind, _, _ in heard[1:]] == ["tick"] * 39
            assert psutil.Process(gateway.process.pid).memory_info().rss - before < 8 << 20
        assert gateway.terminate() == 0
    finally:
        for connection in deaf:
            connection.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="the system cannot tell deaf clients")
async def test_a_client_that_never_reads_loses_its_place_and_a_slow_one_keeps_it() -> None:
    app, ended = FastAPI(), asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)
        finally:
            ended.set()

    async def now_and_then() -> AsyncIterator[bytes]:
        for _ in range(3):
            await asyncio.sleep(1.5)
            yield b"x"

    app.get("/endless")(lambda: StreamingResponse(endless()))
    app.get("/slow")(lambda: StreamingResponse(now_and_then()))
    listener = listen_with_timeout("127.0.0.1", 0, "gateway.port", unread_seconds=1.0)
    async with http_server(app, listener, grace_seconds=1) as port:
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"GET /slow HTTP/1.0\r\nHost: a\r\n\r\n")
        deaf = socket.socket()
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", port))
        deaf.sendall(b"GET /endless HTTP/1.1\r\nHost: a\r\n\r\n")
        async with asyncio.timeout(120):
            await ended.wait()
            assert (await slow_reader.read()).endswith(b"xxx")
        deaf.close()
        slow_writer.close()
