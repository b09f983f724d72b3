"""The caller's side of GenerationService: one channel per generator, errors of rollmesh instead of gRPC codes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from types import TracebackType
from typing import Self

import grpc.aio

from rollmesh.errors import RollmeshError
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.types import Chunk, GenerationCall, GeneratorRecord
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_messages import VersionNeed, chunk_from_pb, error_from_rpc, request_to_pb

_CHANNELS = 256
"""Channels kept; generators come and go, and idle channels to dead ones would pile up."""


class _Line:
    """A channel to one address."""

    def __init__(self, address: str, security: PortSecurity) -> None:
        self.certificates = security.channel_state()
        self.channel = create_channel(address, security)
        self.stub = stubs.GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.calls = 0


class GenerationClient:
    """Calls generators by their records; safe for any number of concurrent calls in one loop."""

    def __init__(self, security: PortSecurity = OPEN) -> None:
        self._security = security
        self._lines: OrderedDict[str, _Line] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every channel; running calls end with an EngineError."""
        for line in self._lines.values():
            await line.channel.close()
        self._lines.clear()

    async def generate(
        self,
        record: GeneratorRecord,
        call: GenerationCall,
        *,
        min_policy_version: int = 0,
        pinned_policy_version: int | None = None,
        traceparent: str = "",
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; the last one carries a finish reason.

        A call with an ``unacknowledged_token_limit`` is held while ``acknowledge`` is behind, and ends as
        ``interrupted`` when it stays behind.
        Raises GenerationRefused (not now, not here), EngineError (the generator or the way to it is broken) or
        DataError (the call can never work). Closing the generator cancels the call; its undelivered tokens are lost.
        """
        need = VersionNeed(
            instance_id=record.instance_id,
            min_policy_version=min_policy_version,
            pinned_policy_version=pinned_policy_version,
        )
        line = await self._line(record.address)
        metadata = call_metadata(traceparent=traceparent, token=self._security.sent_token)
        stream = line.stub.Generate(request_to_pb(call, need), metadata=metadata)
        received = False
        line.calls += 1
        try:
            async for response in stream:
                yield chunk_from_pb(response)
                received = True
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, record.address, received, self._security.explain) from error
        finally:
            line.calls -= 1
            stream.cancel()

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        """End these calls (none named: all) as ``interrupted`` with the tokens they have; returns how many."""
        line = await self._line(record.address)
        try:
            response = await line.stub.Interrupt(
                pb.InterruptRequest(trajectory_ids=trajectory_ids), metadata=self._metadata()
            )
        except grpc.aio.AioRpcError as error:
            raise self._error(error, record.address) from error
        return int(response.interrupted_count)

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        """Tell the generator how much of each trajectory, prompt included, is durable."""
        line = await self._line(record.address)
        request = pb.AcknowledgeRequest(
            instance_id=record.instance_id,
            acknowledgements=[
                pb.Acknowledgement(trajectory_id=name, context_token_count=count)
                for name, count in context_token_counts.items()
            ],
        )
        try:
            await line.stub.Acknowledge(request, metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise self._error(error, record.address) from error

    async def status(self, record: GeneratorRecord) -> pb.GetStatusResponse:
        """Version, load and capacity of a generator."""
        line = await self._line(record.address)
        try:
            response: pb.GetStatusResponse = await line.stub.GetStatus(pb.GetStatusRequest(), metadata=self._metadata())
        except grpc.aio.AioRpcError as error:
            raise self._error(error, record.address) from error
        return response

    def _error(self, error: grpc.aio.AioRpcError, address: str) -> RollmeshError:
        return error_from_rpc(error, address, False, self._security.explain)

    def _metadata(self) -> tuple[tuple[str, str], ...]:
        return call_metadata(token=self._security.sent_token)

    async def _line(self, address: str) -> _Line:
        line = self._lines.get(address)
        if line is not None and not line.calls and line.certificates is not self._security.channel_state():
            # Its certificates have been rotated: the next connection would be made with the old ones.
            await self._lines.pop(address).channel.close()
            line = self._lines.get(address)
        if line is None:
            line = self._lines[address] = _Line(address, self._security)
        self._lines.move_to_end(address)
        idle = [a for a, other in self._lines.items() if not other.calls and other is not line]
        for surplus in idle[: max(0, len(self._lines) - _CHANNELS)]:
            await self._lines.pop(surplus).channel.close()
        return line
