"""TCP ports of a run as targets: random calls of its gRPC services, and bytes that no protocol allows on all ports."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import numpy as np
import psutil
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2

from rollmesh.checkpoints.sealing import TOKEN_FILE as GATEWAY_TOKEN_FILE
from rollmesh.launcher.run_folder import RunFolder
from rollmesh.launcher.service_specs import TOKEN_FILE
from rollmesh.runtime.endpoints import Endpoint, read_endpoints
from rollmesh.runtime.grpc import call_metadata
from rollmesh.v1 import generation_service_pb2 as generation
from rollmesh.v1 import generation_service_pb2_grpc as generation_stubs
from rollmesh.v1 import reward_service_pb2 as reward
from rollmesh.v1 import teacher_service_pb2 as teacher
from rollmesh.wire.generation_client import ERROR_KEY

from .messages import INTEGERS, Values, corrupted

_MAX_MESSAGE: list[tuple[str, Any]] = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
"""Options of our channels: they remove the client's limit, so that the server's limit applies."""
_CANCELLED_SHARE, _CANCELLED_SECONDS = 0.08, (0.0, 0.001, 0.01, 0.1)
"""Requests that our side ends early, and when."""
_WATCH_SECONDS = 0.05
_THINNED_SHARE = 0.02
"""Share of the requests with an effect on the run that are sent."""
_FAULTS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"})
_MOST_READ_BYTES = 1 << 26
_KNOWN_FIELDS: Mapping[str, Sequence[Any]] = {
    "trajectory_id": ("f-1", "f-2", "f-3"),
    "group_id": ("f",),
    "dtype": (1,),
    "data": (np.array([1, 2, 3, 4], np.int32).tobytes(),),
    "prompt_token_count": (4,),
    "max_new_token_count": (1, 8),
    "chunk_token_count": (1, 4),
    "temperature": (1.0,),
    "top_p": (1.0,),
    "top_k": (0, 5),
    "min_p": (0.0, 0.1),
    "kept_tokens": (0, 8),
    "stop_token_ids": (1, 2),
    "min_policy_version": (0,),
    "pinned_policy_version_plus_one": (0,),
    "unacknowledged_token_limit": (0, 8),
    "verifier": ("countdown", "countdown", "countdown", "exact", "math", "python_code"),
    "finish_reason": (1, 2),
    "service": ("", "rollmesh.v1.GenerationService"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Result of a request."""

    outcome: str
    """Outcome: gRPC code, HTTP status, ``cancelled`` or ``closed``."""
    detail: str = ""
    fault: bool = False
    backpressure: bool = False
    """True for a documented temporary rejection: UNAVAILABLE with the error's class, 503 with Retry-After or a JSON
    error."""


async def open_ports(folder: RunFolder, stack: AsyncExitStack, launcher: int) -> "list[GrpcPort | RawPort]":
    """Return every TCP port on which a process of the run listens."""
    mesh_token = (folder.path / TOKEN_FILE).read_text().strip()
    gateway_token = (folder.path / GATEWAY_TOKEN_FILE).read_text().strip()
    ports: list[GrpcPort | RawPort] = []
    for endpoint in read_endpoints(folder.path):
        name = f"{endpoint.service}-{endpoint.index}"
        ports.append(RawPort(name=f"{name} admin", port=_number(endpoint.admin), token=mesh_token))
        if endpoint.grpc:
            ports.append(await _grpc_port(endpoint, mesh_token, stack))
            ports.append(RawPort(name=f"{name} gRPC, raw", port=_number(endpoint.grpc), token=mesh_token))
        if endpoint.url:
            number = _number(endpoint.url.split("/")[2])
            ports.append(RawPort(name=name, port=number, token=gateway_token, weight=2.0))
    named = {port.port for port in ports if isinstance(port, RawPort)}
    found = (process.net_connections("tcp") for process in _tree(launcher))
    others = {c.laddr.port for connections in found for c in connections if c.status == psutil.CONN_LISTEN} - named
    return [*ports, *(RawPort(name=f"port {number}", port=number, token=mesh_token) for number in sorted(others))]


def _tree(pid: int) -> list[psutil.Process]:
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]


def _number(address: str) -> int:
    return int(address.rpartition(":")[2])


async def _grpc_port(endpoint: Endpoint, token: str, stack: AsyncExitStack) -> "GrpcPort":
    channel = await stack.enter_async_context(grpc.aio.insecure_channel(endpoint.grpc, options=_MAX_MESSAGE))
    known = dict(_KNOWN_FIELDS)
    if endpoint.service == "generator":
        stub = generation_stubs.GenerationServiceStub(channel)  # type: ignore[no-untyped-call]
        answer = await stub.GetStatus(generation.GetStatusRequest(), metadata=call_metadata(token=token))
        known["instance_id"] = (answer.instance_id,)
    file = {"generator": generation, "reward": reward}.get(endpoint.service, teacher).DESCRIPTOR
    services = (*list(file.services_by_name.values()) * 3, health_pb2.DESCRIPTOR.services_by_name["Health"])
    name = f"{endpoint.service}-{endpoint.index} gRPC"
    return GrpcPort(name=name, channel=channel, services=services, token=token, known=known)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcPort:
    """gRPC port with its services."""

    name: str
    channel: grpc.aio.Channel
    services: Sequence[ServiceDescriptor]
    token: str
    known: Mapping[str, Sequence[Any]]
    weight: float = 6.0
    """Share of the requests, relative to other ports."""

    async def send(self, rng: random.Random) -> Answer:
        """Call a random method with a random message."""
        service = rng.choice(self.services)
        method = rng.choice(service.methods)
        path, token = f"/{service.full_name}/{method.name}", random_token(rng, self.token)
        values = Values(rng, self.known, rng.choice((0.03, 0.3, 1.0)))
        data, way = values.message(GetMessageClass(method.input_type)).SerializeToString(), rng.random()
        if way > 0.9995:
            data = rng.choice((b"\0", b"\n", b"x")) * rng.choice((10 << 20, 65 << 20))
        elif way > 0.8:
            data = corrupted(rng, data)
        if rng.random() < 0.04:
            path = rng.choice((path + "x", "/", "//", f"/{values.text()[:200]!a}/x", "/rollmesh.v1.Nothing/Do"))
        if token == self.token and not may_send(method.name, method.input_type, data, rng):
            token = "wrong"
        seconds = _WATCH_SECONDS if method.name == "Watch" else None
        if rng.random() < _CANCELLED_SHARE:
            seconds = rng.choice(_CANCELLED_SECONDS)
        answer = await self._call(path, data, token, seconds)
        if method.name == "Pause":
            await self.undo()
        return answer

    async def undo(self) -> None:
        """Send Resume, to end a pause."""
        await self._call("/rollmesh.v1.GenerationService/Resume", b"", self.token, None)

    async def _call(self, path: str, data: bytes, token: str, seconds: float | None) -> Answer:
        method: Any = self.channel.unary_stream(path)
        call = method(data, metadata=call_metadata(token=token))
        try:
            async with asyncio.timeout(seconds):
                async for _ in call:
                    pass
                return Answer(outcome=(await call.code()).name)
        except TimeoutError:
            call.cancel()
            return Answer(outcome="cancelled")
        except asyncio.CancelledError:
            if (task := asyncio.current_task()) is not None and task.cancelling():
                raise
            return Answer(outcome="CANCELLED")  # cancelled by the server: gRPC raises the same error
        except grpc.aio.AioRpcError as error:
            code, detail = error.code(), error.details() or ""
            is_documented = ERROR_KEY in dict(error.trailing_metadata() or ())
            unavailable = code is grpc.StatusCode.UNAVAILABLE
            cut_off = "metadata size exceeds" in detail  # the details of the status exceed gRPC's limit
            return Answer(
                outcome=code.name,
                detail=f"{path}: {detail}",
                fault=code.name in _FAULTS or (unavailable and not is_documented) or cut_off,
                backpressure=(unavailable and is_documented) or code is grpc.StatusCode.RESOURCE_EXHAUSTED,
            )


def random_token(rng: random.Random, token: str) -> str:
    """Return the right token in most cases, otherwise none or a wrong token."""
    return rng.choices((token, "", "wrong", token[:-1], "x" * 5_000), (80, 8, 4, 4, 4))[0]


def may_send(method: str, kind: Any, data: bytes, rng: random.Random) -> bool:
    """Return False for Drain, and for most other requests with an effect on the run."""
    if method == "Drain":
        return False
    try:
        message: Message = GetMessageClass(kind).FromString(data)
    except DecodeError:
        return True
    effect = method == "Pause"
    effect = effect or (method == "Interrupt" and not message.trajectory_ids)  # type: ignore[attr-defined]
    effect = effect or (method == "LoadPolicy" and 0 <= message.policy_version < 2**20)  # type: ignore[attr-defined]
    return not effect or rng.random() < _THINNED_SHARE


@dataclass(frozen=True, slots=True, kw_only=True)
class RawPort:
    """TCP port of this machine that receives bytes outside its protocol."""

    name: str
    port: int
    token: str
    """Token with which a request reads like one of a client."""
    weight: float = 0.5
    """Share of the requests, relative to other ports."""

    async def send(self, rng: random.Random) -> Answer:
        """Send bytes that are not a valid request, or a body that is not valid JSON, and close our side."""
        seconds = rng.choice(_CANCELLED_SECONDS) if rng.random() < _CANCELLED_SHARE else None
        data = _broken_body(rng, random_token(rng, self.token)) if rng.random() < 0.5 else rng.choice(_GARBAGE)(rng)
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError as error:
            return Answer(outcome="no connection", detail=repr(error), fault=True)
        sending, received = asyncio.create_task(_write(writer, data)), b""
        try:
            async with asyncio.timeout(seconds):
                while len(received) < _MOST_READ_BYTES and (more := await reader.read(1 << 16)):
                    received += more
        except TimeoutError:
            return _parsed(received) if received else Answer(outcome="cancelled")
        except OSError:
            pass  # closed by the server
        finally:
            sending.cancel()
            writer.transport.abort()
        return _parsed(received)

    async def slow(self, rng: random.Random) -> Answer:
        """Begin a request that never ends, without data or with more headers; wait until the server closes."""
        start, more = rng.choice(_ENDLESS)
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)

        async def read_all() -> bytes:
            with contextlib.suppress(OSError):
                return await reader.read()
            return b""

        try:
            writer.write(start)
            closed = asyncio.create_task(read_all())
            while not closed.done():
                writer.write(more)
                await asyncio.wait([closed], timeout=0.5)
            return _parsed(closed.result())
        finally:
            writer.transport.abort()


async def _write(writer: asyncio.StreamWriter, data: bytes) -> None:
    with contextlib.suppress(OSError, RuntimeError):  # the server closed the connection; the reader has the answer
        writer.write(data)
        await writer.drain()
        writer.write_eof()


def _parsed(received: bytes) -> Answer:
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


_PATHS = ("/v1/chat/completions", "/v1/completions", "/api/v1/scale", "/metrics", "/../../etc/passwd")


def _broken_body(rng: random.Random, token: str) -> bytes:
    """Return a request whose body no route accepts: damaged, deeply nested or long JSON."""
    fine = b'{"model": "fuzz", "prompt": [1, 2], "messages": [{"role": "user", "content": "1 + 2"}], "max_tokens": 1}'
    body = corrupted(rng, fine)
    if rng.random() < 0.2:
        letters = b"x" * rng.choice((1 << 20, 12 << 20))
        body = rng.choice((b'{"a":' * 50_000, b"[" * rng.choice((600, 1_000_000)), b'"' + letters + b'"', b""))
    if rng.random() < 0.1:
        framing, body = b"Transfer-Encoding: chunked", b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        framing = b"Content-Length: %d" % len(body)
    kind = rng.choice((b"application/json", b"application/json", b"text/plain", b"multipart/form-data"))
    head = f"POST {rng.choice(_PATHS)} HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer {token}\r\n".encode()
    return b"%bContent-Type: %b\r\nConnection: close\r\n%b\r\n\r\n%b" % (head, kind, framing, body)


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
_GARBAGE: Sequence[Callable[[random.Random], bytes]] = (
    lambda rng: rng.randbytes(rng.choice((0, 1, 100, 100_000))),
    lambda rng: b"GET / HTTP/1.1\r\nX: " + b"a" * rng.choice((10_000, 70_000, 1_000_000)) + b"\r\n\r\n",
    lambda rng: b"GET / HTTP/1.1\r\n" + b"X: 1\r\n" * rng.choice((200, 20_000)) + b"\r\n",
    lambda rng: b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n{}" % rng.choice(INTEGERS),
    lambda rng: b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n{}",
    lambda rng: _HEAD + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffff\r\n",
    lambda rng: b"GET / HTTP/9.9\r\n\r\n",
    lambda rng: b"GET /" + rng.randbytes(20) + b" HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    lambda rng: b"GET /?" + b"a" * 9_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
    lambda rng: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(500),
    lambda rng: _PREFACE + rng.randbytes(rng.choice((0, 9, 200))),
    lambda rng: b"GET /api/v1/events HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n",
)
