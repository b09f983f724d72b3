"""Clients of services that score trajectories: coalesced calls, a deadline, retries while none is reachable."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from rollmesh.config import RunConfig
from rollmesh.errors import RewardUnavailable, RollmeshError
from rollmesh.runtime.endpoints import Addresses, service_addresses
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.runtime.tasks import BackgroundTasks, Backoff
from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_from_pb
from rollmesh.wire.reward_messages import score_item_to_pb

_MOST_ITEMS_PER_CALL = 64
_MOST_BYTES_PER_CALL = 8 << 20
_BACKOFF = Backoff(first_seconds=0.05, longest_seconds=2.0, jitter=0.5)
_ADDRESS_REFRESH_SECONDS = 5.0
_LOG_SECONDS = 30.0
_NONE = "none is registered"
_RETRIED_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""Codes that are retried at the same or another replica; scoring twice is harmless."""


M = TypeVar("M", bound=Message)
R = TypeVar("R")


class ScoringCall(Protocol):
    """A call in progress: a stream of responses, each with the ``item_index`` of its item."""

    def __aiter__(self) -> AsyncIterator[Any]: ...

    def cancel(self) -> object: ...


OpenCall = Callable[[Sequence[M], float, tuple[tuple[str, str], ...]], ScoringCall]
"""Function that calls a service with items, a time limit in seconds and metadata."""


@dataclass(slots=True)
class _Connection(Generic[M]):
    channel: grpc.aio.Channel
    call: OpenCall[M]
    address: str
    item_count: int = 0
    """Number of items in calls in progress."""
    checked: bool = False
    """True once the service behind it was checked."""
    failed: bool = False
    """True if the channel must be closed once idle: a new one connects at once, an old one backs off for minutes."""


@dataclass(slots=True)
class _Waiting(Generic[M, R]):
    item: M
    traceparent: str
    result: asyncio.Future[R]


class ScoringClient(ABC, Generic[M, R]):
    """Client of the least busy of several equal services; safe for any number of concurrent calls in one loop."""

    unavailable: ClassVar[type[RollmeshError]]
    """Error of a call that found no service, or that no service could serve."""
    timed_out: ClassVar[type[RollmeshError]]
    """Error of a call that a service did not answer before the deadline."""

    def __init__(
        self, name: str, addresses: Addresses, security: PortSecurity, deadline_seconds: float, waits: Waits | None
    ) -> None:
        """``name`` begins every message; ``addresses`` returns the host:port of the services.

        ``deadline_seconds`` limits a call with all its retries and its waiting time in the service. ``waits`` shows
        why a call is retried.
        """
        self._name = name
        self._addresses = addresses
        self._security = security
        self._deadline_seconds = deadline_seconds
        self._waits = waits or Waits()
        self._connections: dict[str, _Connection[M]] = {}
        self._read_at = -_ADDRESS_REFRESH_SECONDS
        self._log_retry_at = 0.0
        self._pending: list[_Waiting[M, R]] = []
        self._calls = BackgroundTasks()
        self._closing = BackgroundTasks()

    @abstractmethod
    def _open(self, channel: grpc.aio.Channel) -> OpenCall[M]:
        """Return the function that calls the service behind a channel."""

    async def _check(self, channel: grpc.aio.Channel, timeout: float, metadata: tuple[tuple[str, str], ...]) -> None:
        """Check the service behind a new channel; an error is that of every call that waits for it."""

    @abstractmethod
    def _result(self, response: Any) -> R:
        """Return the result of a response; an error is that of its item."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Cancel the calls in progress, which raise ``unavailable``, and close the channels."""
        await self._calls.cancel()
        _fail(self._pending, self._closed())
        self._pending = []
        await asyncio.gather(*self._closing, *(connection.channel.close() for connection in self._connections.values()))
        self._connections.clear()

    async def _score(self, items: Sequence[tuple[M, str]]) -> list[R]:
        """Score items, each with its trace context; returns one result per item, in order.

        Calls in the same iteration of the event loop share a request, and each returns as soon as its results arrive.
        """
        loop = asyncio.get_running_loop()
        waiting = [_Waiting[M, R](item, traceparent, loop.create_future()) for item, traceparent in items]
        if waiting and not self._pending:
            loop.call_soon(self._flush)
        self._pending += waiting
        return list(await asyncio.gather(*(w.result for w in waiting)))

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        batches: list[list[_Waiting[M, R]]] = []
        size = 0
        for waiting in pending:
            item_bytes = waiting.item.ByteSize()
            if not batches or len(batches[-1]) >= _MOST_ITEMS_PER_CALL or size + item_bytes > _MOST_BYTES_PER_CALL:
                batches.append([])
                size = 0
            batches[-1].append(waiting)
            size += item_bytes
        for batch in batches:
            self._calls.start(self._deliver(batch), f"{self._name}-call")

    async def _deliver(self, batch: list[_Waiting[M, R]]) -> None:
        try:
            await self._call(batch, time.monotonic() + self._deadline_seconds)
        except asyncio.CancelledError:
            _fail(batch, self._closed())
            raise
        except Exception as error:
            _fail(batch, error)

    async def _call(self, batch: list[_Waiting[M, R]], deadline: float) -> None:
        """Send a batch until every item has a result; retries contain only the items without one."""
        attempt, reason, error_type = 0, "", self.unavailable
        while (remaining := deadline - time.monotonic()) > 0:
            connection = await self._least_busy()
            if connection is not None:
                connection.item_count += len(batch)
                # Built for each attempt: the token may have changed since the previous one.
                metadata = call_metadata(traceparent=batch[0].traceparent, token=self._security.sent_token)
                try:
                    if not connection.checked:
                        await self._check(connection.channel, remaining, metadata)
                        connection.checked = True
                    await self._receive(connection.call, batch, remaining, metadata)
                    self._waits.end(self._name)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        # The error of an earlier attempt is more useful than the expired deadline.
                        if not reason:
                            error_type = self.timed_out
                            reason = f"DEADLINE_EXCEEDED: {connection.address} did not answer"
                        break
                    reason = f"{error.code().name}: {self._security.explain(error.details() or '')}"
                    if error.code() not in _RETRIED_CODES:
                        self._waits.begin(self._name, f"{self._name} service: {reason}")
                        raise self.unavailable(f"{self._name}: {reason}") from error
                    connection.failed = True
                    if time.monotonic() >= self._log_retry_at:  # the deadline of a call may be minutes later
                        self._log_retry_at = time.monotonic() + _LOG_SECONDS
                        get_logger("scoring-client").warning("service_not_reached", name=self._name, message=reason)
                finally:
                    connection.item_count -= len(batch)
                    self._retire(connection)
                batch = [waiting for waiting in batch if not waiting.result.done()]
                if not batch:
                    return
            self._waits.begin(self._name, f"{self._name} service: {reason or _NONE}")
            attempt += 1
            await asyncio.sleep(min(_BACKOFF.seconds(attempt), max(0.0, deadline - time.monotonic())))
        reason = reason or _NONE
        raise error_type(f"{self._name}: no service answered within {self._deadline_seconds:g} s; {reason}")

    async def _least_busy(self) -> _Connection[M] | None:
        if not self._usable() or time.monotonic() - self._read_at >= _ADDRESS_REFRESH_SECONDS:
            self._read_at = time.monotonic()
            # In a thread: a name server may be slow, and the worker's other tasks run in this loop.
            self._refresh(set(await asyncio.to_thread(self._addresses)))
        return min(self._usable(), key=lambda connection: connection.item_count, default=None)

    def _usable(self) -> list[_Connection[M]]:
        return [connection for connection in self._connections.values() if not connection.failed]

    def _refresh(self, addresses: set[str]) -> None:
        for address in addresses - self._connections.keys():
            channel = create_channel(address, self._security)
            self._connections[address] = _Connection(channel, self._open(channel), address)
        for address in self._connections.keys() - addresses:
            self._connections[address].failed = True
            self._retire(self._connections[address])

    def _retire(self, connection: _Connection[M]) -> None:
        in_use = connection.item_count or self._connections.get(connection.address) is not connection
        if connection.failed and not in_use:
            del self._connections[connection.address]
            self._closing.start(connection.channel.close())

    async def _receive(
        self,
        open_call: OpenCall[M],
        batch: Sequence[_Waiting[M, R]],
        timeout: float,
        metadata: tuple[tuple[str, str], ...],
    ) -> None:
        call = open_call([w.item for w in batch], timeout, metadata)
        count = 0
        try:
            async for response in call:
                if not 0 <= response.item_index < len(batch):
                    raise self.unavailable(f"{self._name}: item_index {response.item_index} of {len(batch)} answers")
                count += 1
                self._set_result(batch[response.item_index].result, response)
        finally:
            call.cancel()
        if any(not waiting.result.done() for waiting in batch):
            raise self.unavailable(f"{self._name}: the service returned {count} outcomes for {len(batch)} answers")

    def _set_result(self, result: asyncio.Future[R], response: Any) -> None:
        if result.done():
            return
        try:
            result.set_result(self._result(response))
        except RollmeshError as error:
            result.set_exception(error)

    def _closed(self) -> RollmeshError:
        return self.unavailable(f"{self._name}: the client has been closed")


def _fail(batch: Sequence[_Waiting[Any, Any]], error: BaseException) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)


class RewardClient(ScoringClient[pb.ScoreItem, RewardOutcome]):
    """Client of the reward services of a run."""

    unavailable = timed_out = RewardUnavailable

    def __init__(
        self,
        config: RunConfig,
        *,
        addresses: Addresses | None = None,
        security: PortSecurity = OPEN,
        deadline_seconds: float = 300.0,
        waits: Waits | None = None,
    ) -> None:
        """``addresses`` returns the host:port of the services; the default uses the run file."""
        addresses = addresses or service_addresses(config, "reward", config.reward.address, "reward")
        super().__init__("reward", addresses, security, deadline_seconds, waits)

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """Score finished trajectories; returns one outcome per trajectory, in order.

        Raises RewardUnavailable if no service answers before the deadline.
        """
        return await self._score([(score_item_to_pb(t), t.traceparent) for t in trajectories])

    def _open(self, channel: grpc.aio.Channel) -> OpenCall[pb.ScoreItem]:
        stub = stubs.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
        return lambda items, timeout, metadata: stub.Score(
            pb.ScoreRequest(items=items), timeout=timeout, metadata=metadata
        )

    def _result(self, response: pb.ScoreResponse) -> RewardOutcome:
        return outcome_from_pb(response.outcome)
