"""Clients that take nothing of what they are told."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from rollmesh.runtime.http_server import http_server, listen_with_timeout


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
