"""HTTP servers: limits of time."""

from __future__ import annotations

import asyncio

import httpx
from fastapi import FastAPI, Request

from rollmesh.runtime.health import Health
from rollmesh.runtime.http_server import http_server, listen
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.service_host import admin_server

LINES = 2_000
"""Header lines that a client sends at most, 20 ms apart: thirteen times the time that it has."""
_CLIENTS_KEEP_SECONDS = httpx.Limits().keepalive_expiry


async def dribble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    """Send header lines until the server closes the connection; returns how many it took."""
    closed = asyncio.ensure_future(reader.read())
    for sent in range(LINES):
        if closed.done():
            return sent
        try:
            writer.write(b"X-More: 1\r\n")
            await writer.drain()
        except ConnectionError:
            return sent
        await asyncio.wait([closed], timeout=0.02)
    raise AssertionError("the connection is still open")


async def test_a_client_whose_headers_never_end_is_cut_off_and_a_slow_answer_is_not() -> None:
    app = FastAPI()

    @app.post("/echo")
    async def echo(request: Request) -> int:
        return len(await request.body())

    async with http_server(app, listen("127.0.0.1", 0, "port"), grace_seconds=1, head_seconds=3.0) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\n")
        slow_reader, slow_writer = await asyncio.open_connection("127.0.0.1", port)
        slow_writer.write(b"POST /echo HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nab")
        assert await dribble(reader, writer) > 1
        # More than the time of a head has passed; the body may take longer.
        slow_writer.write(b"c")
        assert await slow_reader.readuntil(b"\r\n\r\n3")
        # The next request on the same connection has the time of a head again.
        slow_writer.write(b"POST /echo HTTP/1.1\r\n")
        assert await dribble(slow_reader, slow_writer) > 1
        writer.close()
        slow_writer.close()


async def _ask(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    writer.write(b"GET /healthz HTTP/1.1\r\nHost: mesh\r\n\r\n")
    head = await reader.readuntil(b"\r\n\r\n")
    (length,) = (line for line in head.splitlines() if line.lower().startswith(b"content-length:"))
    await reader.readexactly(int(length.split(b":")[1]))
    return head.splitlines()[0]


async def test_a_connection_that_a_client_still_keeps_is_not_closed_by_the_server() -> None:
    async with admin_server(Metrics("demo"), Health(), "127.0.0.1") as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            assert await _ask(reader, writer) == b"HTTP/1.1 200 OK"
            assert _CLIENTS_KEEP_SECONDS is not None
            await asyncio.sleep(_CLIENTS_KEEP_SECONDS + 1.0)
            assert await _ask(reader, writer) == b"HTTP/1.1 200 OK"
        finally:
            writer.close()
