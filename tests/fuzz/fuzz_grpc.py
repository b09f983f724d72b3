"""Random calls of the fuzz bench to a gRPC port."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from rollmesh.runtime.grpc import call_metadata
from rollmesh.wire.generation_messages import ERROR_KEY

from .fuzz_answers import Answer, is_rarely_sent, random_time_limit, random_token, random_values

_HEALTH_WATCH_SECONDS = 0.05
_FAULTS = frozenset({"UNKNOWN", "INTERNAL", "DATA_LOSS", "DEADLINE_EXCEEDED"})


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpcPort:
    """gRPC port with its services."""

    name: str
    channel: grpc.aio.Channel
    services: Sequence[ServiceDescriptor]
    token: str
    known: Mapping[str, Sequence[Any]]
    weight: float = 4.0
    """Share of the requests, relative to other ports."""

    async def send(self, rng: random.Random) -> Answer:
        """Call a random method with a random message."""
        service = rng.choice(self.services)
        method = rng.choice(service.methods)
        path, token = f"/{service.full_name}/{method.name}", random_token(rng, self.token)
        values = random_values(rng, self.known)
        message = values.message(GetMessageClass(method.input_type))
        way = rng.random()
        data = message.SerializeToString() if way < 0.8 else values.corrupted(message.SerializeToString())
        if way > 0.9995:
            data = rng.choice((b"\0", b"\n", b"x")) * rng.choice((10 << 20, 65 << 20))
        if rng.random() < 0.04:
            path = rng.choice((path + "x", "/", "//", f"/{values.text()[:200]!a}/x", "/rollmesh.v1.Nothing/Do"))
        if token == self.token and not may_send_grpc(method.name, method.input_type, data, rng):
            token = "wrong"
        seconds = random_time_limit(rng, _HEALTH_WATCH_SECONDS if method.name == "Watch" else None)
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
                code, detail = await call.code(), ""
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
            fault = code.name in _FAULTS or (unavailable and not is_documented) or cut_off
            return Answer(
                outcome=code.name,
                detail=f"{path}: {detail}",
                fault=fault,
                backpressure=(unavailable and is_documented) or code is grpc.StatusCode.RESOURCE_EXHAUSTED,
            )
        return Answer(outcome=code.name)


def may_send_grpc(method: str, kind: Any, data: bytes, rng: random.Random) -> bool:
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
    return not effect or is_rarely_sent(rng)
