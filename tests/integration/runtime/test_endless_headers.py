"""Clients whose request headers never end."""

from __future__ import annotations

import asyncio

from fastapi import FastAPI, Request

from rollmesh.runtime.http_server import http_server, listen

LINES = 2_000
"""Header lines that a client sends at most, 20 ms apart: thirteen times the time that it has."""


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
