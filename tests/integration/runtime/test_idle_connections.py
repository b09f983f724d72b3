"""Idle connections: the server never closes one before its client."""

from __future__ import annotations

import asyncio

import httpx

from rollmesh.runtime.health import Health
from rollmesh.runtime.metrics import Metrics
from rollmesh.runtime.service_host import admin_server

_CLIENTS_KEEP_SECONDS = httpx.Limits().keepalive_expiry


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
