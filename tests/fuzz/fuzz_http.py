"""Random requests of the fuzz bench to an HTTP port, and bytes outside the protocol to any TCP port."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, unquote, urlencode

from .fuzz_answers import Answer, is_rarely_sent, random_time_limit, random_token, random_values
from .fuzz_values import INTEGERS, Values

_EVENTS_SECONDS = 0.2
_MOST_READ_BYTES = 1 << 26
_METHODS = ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW")


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPort:
    """TCP port that receives bytes outside its protocol."""

    name: str
    host: str
    port: int
    weight: float = 0.3
    """Share of the requests, relative to other ports."""

    async def send(self, rng: random.Random) -> Answer:
        """Send bytes that are not a valid request and close our side."""
        return await self.raw(rng.choice(_GARBAGE)(rng), end=True)

    async def raw(self, data: bytes, *, seconds: float | None = None, end: bool = False) -> Answer:
        """Send bytes over a new connection and read to its end, or for ``seconds``; ``end`` closes our side first."""
        try:
            reader, writer = await asyncio.open_connection(self.host, self.port)
        except OSError as error:
            return Answer(outcome="no connection", detail=repr(error), fault=True)
        sending = asyncio.create_task(_write(writer, data, end))
        received = b""
        try:
            async with asyncio.timeout(seconds):
                while len(received) < _MOST_READ_BYTES and (data_read := await reader.read(1 << 16)):
                    received = received[:4_000] + data_read if len(received) > 8_000 else received + data_read
        except TimeoutError:
            return _parse_answer(received) if received else Answer(outcome="cancelled")
        except OSError:
            return _parse_answer(received)
        finally:
            sending.cancel()
            writer.transport.abort()
        return _parse_answer(received)

    async def slow(self, rng: random.Random) -> Answer:
        """Begin a request that never ends, without data or with more headers; wait until the server closes."""
        start, more = rng.choice(_ENDLESS)
        reader, writer = await asyncio.open_connection(self.host, self.port)
        try:
            writer.write(start)
            closed = asyncio.create_task(_read_all(reader))
            while not closed.done():
                writer.write(more)
                await asyncio.wait([closed], timeout=0.5)
            return _parse_answer(closed.result())
        finally:
            writer.transport.abort()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpPort(RawPort):
    """HTTP port with the OpenAPI document of its routes."""

    token: str
    document: Mapping[str, Any]
    known: Mapping[str, Sequence[Any]]

    async def send(self, rng: random.Random) -> Answer:
        """Send a random request to a route, or bytes that are not a request."""
        if rng.random() < 0.05:
            return await RawPort.send(self, rng)
        path, method, operation = self._operation(rng)
        values = random_values(rng, self.known)
        token, target = random_token(rng, self.token), self._target(path, operation, values)
        body = self._body(operation, values)
        if rng.random() < 0.06:
            method = rng.choice(_METHODS)
        if rng.random() < 0.04:
            absurd = ("/../../etc/passwd", "//", "*", target + "/%00", "/?" + "a" * 9_000)
            target = rng.choice(("/" + quote(values.text()[:8_000]), *absurd))
        if token == self.token and not may_send_http(method, path, target, body, rng):
            token = "wrong"
        seconds = random_time_limit(rng, _EVENTS_SECONDS if target.startswith("/api/v1/events") else None)
        answer = await self.raw(_request(rng, method, target, token, body), seconds=seconds)
        if token == self.token and method == "POST" and path in _UNDO:
            await self.order(_UNDO[path])
        return answer

    async def order(self, path: str) -> Answer:
        """Send a POST with the right token and no body."""
        return await self.raw(_request(random.Random(0), "POST", path, self.token, b""))

    def _operation(self, rng: random.Random) -> tuple[str, str, Mapping[str, Any]]:
        path, operations = rng.choice(list(self.document["paths"].items()))
        method, operation = rng.choice(list(operations.items()))
        return path, method.upper(), operation

    def _target(self, path: str, operation: Mapping[str, Any], values: Values) -> str:
        query: dict[str, str] = {}
        for parameter in operation.get("parameters", ()):
            value = values.json(parameter.get("schema", {}), self.document, parameter["name"])
            text = (value if isinstance(value, str) else json.dumps(value))[:20_000]
            if parameter["in"] == "path":
                path = path.replace(f"{{{parameter['name']}}}", quote(text, safe=""))
            elif parameter["in"] == "query" and values.rng.random() < 0.7:
                query[parameter["name"]] = text
        return path + (f"?{urlencode(query)}" if query else "")

    def _body(self, operation: Mapping[str, Any], values: Values) -> bytes:
        content = operation.get("requestBody", {}).get("content", {}).get("application/json")
        if content is not None:
            return values.body(content.get("schema", {}), self.document)
        return values.corrupted(b"") if values.rng.random() < 0.1 else b""


_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_ENDLESS = (
    (_HEAD, b"X-More: 1\r\n"),
    (_HEAD, b""),
    (_HEAD + b"Connection: close\r\nContent-Length: 1000\r\n\r\n{", b""),
    (_PREFACE[:-4], b""),
    # SETTINGS, then HEADERS of stream 1 without END_HEADERS.
    (_PREFACE + b"\0\0\0\4\0\0\0\0\0" + b"\0\0\1\1\0\0\0\0\1\x83", b""),
)
"""First bytes, and the bytes that follow every half second."""


async def _write(writer: asyncio.StreamWriter, data: bytes, end: bool) -> None:
    try:
        writer.write(data)
        await writer.drain()
        if end:
            writer.write_eof()
    except (OSError, RuntimeError):  # the server closed the connection; the reader has the answer
        return


async def _read_all(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.read()
    except OSError:
        return b""


def _parse_answer(received: bytes) -> Answer:
    """Return the answer in an HTTP response."""
    line, _, rest = received.partition(b"\r\n")
    words = line.split(b" ")
    if not line.startswith(b"HTTP/1.1 ") or len(words) < 2 or not words[1].isdigit():
        return Answer(outcome="closed", detail=repr(received[:100]) if received else "")
    status, text = int(words[1]), rest.decode(errors="replace")
    is_documented = status == 503 and ("retry-after" in text.lower() or '"error"' in text)
    return Answer(
        outcome=str(status),
        detail=text[-200:] if status >= 500 else "",
        fault=status >= 500 and not is_documented,
        backpressure=is_documented or status == 429,
    )


_UNDO = {"/api/v1/pause": "/api/v1/resume", "/api/v1/policies/{version}/pin": "/api/v1/unpin"}


def may_send_http(method: str, path: str, target: str, body: bytes, rng: random.Random) -> bool:
    """Return False for valid rollback and scale requests, and for most other requests with an effect on the run."""
    if method != "POST":
        return True
    if path == "/api/v1/scale":
        return not _scales(body)
    if path.endswith(("/rollback", "/pin")):
        return not _names_version(target) or (path.endswith("/pin") and is_rarely_sent(rng))
    return path != "/api/v1/pause" or is_rarely_sent(rng)


def _names_version(target: str) -> bool:
    """Return True if a segment of the path may be read as an existing policy version; 0.0 counts too."""
    for segment in target.split("/"):
        with contextlib.suppress(ValueError):
            if 0 <= float(unquote(segment)) < 2**20:
                return True
    return False


def _scales(body: bytes) -> bool:
    try:
        request = json.loads(body)
    except (ValueError, RecursionError):
        return False
    return isinstance(request, dict) and request.get("service") in ("generator", "reward", "rollout")


def _request(rng: random.Random, method: str, target: str, token: str, body: bytes) -> bytes:
    host = rng.choices(("127.0.0.1", "localhost:1", "evil.example", ""), (94, 2, 2, 2))[0]
    lines = [f"{method} {target} HTTP/1.1", f"Host: {host}", "Connection: close"]
    lines += [f"Authorization: Bearer {token}"] if token else []
    if body:
        kind = rng.choices(
            ("application/json", "text/plain", "multipart/form-data", "application/json; charset=x"), (90, 4, 3, 3)
        )
        lines.append(f"Content-Type: {kind[0]}")
    if body and rng.random() < 0.1:
        lines.append("Transfer-Encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    elif body or method != "GET":
        lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


_GARBAGE: Sequence[Callable[[random.Random], bytes]] = (
    lambda rng: rng.randbytes(rng.choice((0, 1, 100, 100_000))),
    lambda rng: b"GET / HTTP/1.1\r\nX: " + b"a" * rng.choice((10_000, 70_000, 1_000_000)) + b"\r\n\r\n",
    lambda rng: b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * rng.choice((200, 20_000)) + b"\r\n",
    lambda rng: b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n{}" % rng.choice(INTEGERS),
    lambda rng: b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    lambda rng: (
        b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffff\r\n"
    ),
    lambda rng: b"GET / HTTP/9.9\r\n\r\n",
    lambda rng: b"GET /" + rng.randbytes(20) + b" HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
    lambda rng: _PREFACE + rng.randbytes(rng.choice((0, 9, 200))),
    lambda rng: b"GET /api/v1/events HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
