"""Client of GenerationService: its messages and errors, and one channel per generator."""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import Any, Self

import grpc.aio
from google.protobuf.message import Message

from rollmesh.errors import DataError, EngineError, GenerationRefused
from rollmesh.kept_sets import pack_sets
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.types import ANY_VERSION, Chunk, GenerationCall, GeneratorRecord, VersionNeed
from rollmesh.v1 import generation_service_pb2 as pb
from rollmesh.v1 import generation_service_pb2_grpc as stubs
from rollmesh.wire.codec import (
    finish_from_pb,
    finish_to_pb,
    floats_from_pb,
    ids_from_pb,
    kept_sets_from_pb,
    same_fields,
    sampling_from_pb,
    sampling_to_pb,
    tensor_to_pb,
)

ERROR_KEY = "rollmesh-error"
"""Trailing metadata key of the error's class: a rejection and a broken connection have the same gRPC codes."""

MOST_ID_CHARACTERS = 512
MOST_IDS = 16_384
"""Maximum number of ids in one request."""
MOST_VERSION = 2**53 - 1
"""Largest integer that is exact in Redis scripts."""

_CALL_FIELDS = (
    *("trajectory_id", "group_id", "prompt_token_count", "max_new_token_count", "chunk_token_count"),
    "unacknowledged_token_limit",
)
_CHUNK_FIELDS = ("policy_version", "kv_min_version", "cached_token_count")

ERRORS: dict[str, type[DataError | EngineError | GenerationRefused]] = {
    e.__name__: e for e in (DataError, EngineError, GenerationRefused)
}
"""Error classes that a generator reports, by name."""


def request_to_pb(call: GenerationCall, instance_id: str, need: VersionNeed) -> pb.GenerateRequest:
    """Encode a generation call to the generator ``instance_id``."""
    pinned = need.pinned_version
    return pb.GenerateRequest(
        **same_fields(call, _CALL_FIELDS),
        context_ids=tensor_to_pb(call.context_ids),
        sampling=sampling_to_pb(call.sampling),
        instance_id=instance_id,
        min_policy_version=need.min_version,
        pinned_policy_version_plus_one=0 if pinned is None else pinned + 1,
    )


def request_from_pb(request: pb.GenerateRequest) -> tuple[GenerationCall, VersionNeed]:
    """Decode a generation call; DataError names the invalid field."""
    for name in ("trajectory_id", "group_id", "instance_id"):
        check_id(getattr(request, name), name)
    for name in ("min_policy_version", "pinned_policy_version_plus_one", "unacknowledged_token_limit"):
        if getattr(request, name) < 0:
            raise DataError(f"{name}={getattr(request, name)}: expected at least 0")
    call = GenerationCall(
        **same_fields(request, _CALL_FIELDS),
        context_ids=ids_from_pb(request.context_ids, "context_ids"),
        sampling=sampling_from_pb(request.sampling),
    )
    pinned = request.pinned_policy_version_plus_one
    return call, VersionNeed(min_version=request.min_policy_version, pinned_version=pinned - 1 if pinned else None)


def check_id(value: str, name: str) -> None:
    """Raise DataError for an id that is longer than any id of the mesh."""
    if len(value) > MOST_ID_CHARACTERS:
        raise DataError(f"{name}: {len(value)} characters, expected at most {MOST_ID_CHARACTERS}")


def check_ids(values: Sequence[str], name: str) -> None:
    """Raise DataError for more ids than a generator has calls, or for an id that is too long."""
    if len(values) > MOST_IDS:
        raise DataError(f"{name}: {len(values)} ids, expected at most {MOST_IDS}")
    for value in values:
        check_id(value, name)


def check_version(version: int) -> None:
    """Raise DataError for a number that is not a valid policy version."""
    if not 0 <= version <= MOST_VERSION:
        raise DataError(f"policy_version={version}: expected 0 to {MOST_VERSION}")


def chunk_to_pb(chunk: Chunk) -> pb.GenerateResponse:
    """Encode a chunk."""
    return pb.GenerateResponse(
        **same_fields(chunk, _CHUNK_FIELDS),
        token_ids=tensor_to_pb(chunk.token_ids),
        behavior_logprobs=tensor_to_pb(chunk.behavior_logprobs),
        finish_reason=finish_to_pb(chunk.finish_reason),
        kept_sets=b"" if chunk.kept_sets is None else pack_sets(chunk.kept_sets),
    )


def chunk_from_pb(response: pb.GenerateResponse) -> Chunk:
    """Decode a chunk; EngineError if the message is malformed."""
    try:
        token_ids = ids_from_pb(response.token_ids)
        return Chunk(
            **same_fields(response, _CHUNK_FIELDS),
            token_ids=token_ids,
            behavior_logprobs=floats_from_pb(response.behavior_logprobs),
            finish_reason=finish_from_pb(response.finish_reason),
            kept_sets=kept_sets_from_pb(response.kept_sets, token_ids),
        )
    except DataError as error:
        raise EngineError(f"the generator sent a malformed chunk: {error}") from error


def error_from_rpc(
    error: grpc.aio.AioRpcError, address: str, received: bool, explain: Callable[[str], str] = str
) -> DataError | EngineError | GenerationRefused:
    """Convert the gRPC error of a failed call into a rollmesh error.

    A DataError keeps its class, and so does a refusal before the first token. A lost connection, a time-out and any
    other error after a token are an EngineError.
    """
    text = explain(error.details() or error.code().name)
    name = dict(error.trailing_metadata() or ()).get(ERROR_KEY)
    kind = ERRORS.get(str(name), EngineError)
    if kind is EngineError or (received and kind is not DataError):
        return EngineError(f"generator {address}: {error.code().name}: {text}")
    return kind(text)


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
