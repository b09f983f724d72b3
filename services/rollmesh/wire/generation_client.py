"""Client of GenerationService: one channel per generator, and rollmesh errors instead of gRPC codes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Self

import grpc.aio
from google.protobuf.message import Message

from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.types import ANY_VERSION, Chunk, GenerationCall, GeneratorRecord, VersionNeed
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.generation_messages import chunk_from_pb, error_from_rpc, request_to_pb

_MAX_CHANNELS = 256
"""Maximum number of open channels; surplus idle channels are closed because generators are replaced over time."""


class _Connection:
    """Channel and stub of one address."""

    def __init__(self, address: str, security: PortSecurity) -> None:
        self.certificates = security.channel_state()
        self.channel = create_channel(address, security)
        self.stub = stubs.GenerationServiceStub(self.channel)  # type: ignore[no-untyped-call]
        self.calls = 0


class GenerationClient:
    """Client of all generators of a mesh; safe for any number of concurrent calls in one loop."""

    def __init__(self, security: PortSecurity = OPEN) -> None:
        self._security = security
        self._connections: OrderedDict[str, _Connection] = OrderedDict()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every channel; calls in progress fail with an EngineError."""
        for connection in self._connections.values():
            await connection.channel.close()
        self._connections.clear()

    async def generate(
        self, record: GeneratorRecord, call: GenerationCall, need: VersionNeed = ANY_VERSION, *, traceparent: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Stream the chunks of one call; the last one carries a finish reason, and others may be empty.

        A call with an ``unacknowledged_token_limit`` is held until ``acknowledge`` reports enough tokens, and ends as
        ``interrupted`` if that takes too long.
        Raises GenerationRefused (retry later or at another generator), EngineError (the generator failed or is
        unreachable) or DataError (the call is invalid). Closing the stream cancels the call; its undelivered tokens
        are lost.
        """
        connection = await self._connection(record.address)
        metadata = call_metadata(traceparent=traceparent, token=self._security.sent_token)
        stream = connection.stub.Generate(request_to_pb(call, record.instance_id, need), metadata=metadata)
        received = False
        connection.calls += 1
        try:
            async for response in stream:
                chunk = chunk_from_pb(response)
                yield chunk
                received = received or len(chunk.token_ids) > 0
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, record.address, received, self._security.explain) from error
        finally:
            connection.calls -= 1
            if not stream.done():
                stream.cancel()

    async def interrupt(self, record: GeneratorRecord, trajectory_ids: Sequence[str]) -> int:
        response = await self._send(record, "Interrupt", pb.InterruptRequest(trajectory_ids=trajectory_ids))
        return int(response.interrupted_count)

    async def acknowledge(self, record: GeneratorRecord, context_token_counts: Mapping[str, int]) -> None:
        """Report the durable tokens of each trajectory, prompt included, to the generator."""
        acknowledgements = [
            pb.Acknowledgement(trajectory_id=name, context_token_count=count)
            for name, count in context_token_counts.items()
        ]
        request = pb.AcknowledgeRequest(instance_id=record.instance_id, acknowledgements=acknowledgements)
        await self._send(record, "Acknowledge", request)

    async def status(self, record: GeneratorRecord) -> pb.GetStatusResponse:
        response: pb.GetStatusResponse = await self._send(record, "GetStatus", pb.GetStatusRequest())
        return response

    async def _send(self, record: GeneratorRecord, method: str, request: Message) -> Any:
        connection = await self._connection(record.address)
        send = getattr(connection.stub, method)
        try:
            return await send(request, metadata=call_metadata(token=self._security.sent_token))
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, record.address, False, self._security.explain) from error

    async def _connection(self, address: str) -> _Connection:
        connection = self._connections.get(address)
        if connection and not connection.calls and connection.certificates is not self._security.channel_state():
            # The certificates have been rotated: a reconnect of this channel would use the old ones.
            await self._connections.pop(address).channel.close()
            connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = _Connection(address, self._security)
        self._connections.move_to_end(address)
        idle = [a for a, other in self._connections.items() if not other.calls and other is not connection]
        for surplus in idle[: max(0, len(self._connections) - _MAX_CHANNELS)]:
            await self._connections.pop(surplus).channel.close()
        return connection
