"""Client of RewardService: coalesced calls, a deadline, and retries while a service is unreachable."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio

from rollmesh.config import RunConfig
from rollmesh.errors import ConfigError, RewardUnavailable
from rollmesh.runtime.addresses import host_port
from rollmesh.runtime.endpoints import read_endpoints
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

MOST_ITEMS_PER_CALL = 64
MOST_BYTES_PER_CALL = 8 << 20
_BACKOFF = Backoff(first_seconds=0.05, longest_seconds=2.0, jitter=0.5)
_ADDRESS_REFRESH_SECONDS = 5.0
_LOG_SECONDS = 30.0
_WAIT = "reward"
_NONE = "none is registered"
_RETRIED_CODES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""Codes that are retried at the same or another replica; scoring twice is harmless."""


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    stub: stubs.RewardServiceStub
    address: str
    item_count: int = 0
    """Number of items in calls in progress."""
    failed: bool = False
    """True if the channel must be closed once idle: a new one connects at once, an old one backs off for minutes."""


@dataclass(slots=True)
class _Waiting:
    item: pb.ScoreItem
    traceparent: str
    result: asyncio.Future[RewardOutcome]


class RewardClient:
    """Client of the least busy reward service of a run; safe for any number of concurrent calls in one loop."""

    def __init__(
        self,
        config: RunConfig,
        *,
        addresses: Addresses | None = None,
        security: PortSecurity = OPEN,
        deadline_seconds: float = 300.0,
        waits: Waits | None = None,
    ) -> None:
        """``addresses`` returns the host:port of the services; the default uses the run file.

        ``deadline_seconds`` limits a call with all its retries and its waiting time in the service. ``waits`` shows
        why a call is retried.
        """
        self._addresses = addresses or reward_addresses(config)
        self._security = security
        self._deadline_seconds = deadline_seconds
        self._waits = waits or Waits()
        self._connections: dict[str, _Connection] = {}
        self._read_at = -_ADDRESS_REFRESH_SECONDS
        self._log_retry_at = 0.0
        self._pending: list[_Waiting] = []
        self._calls = BackgroundTasks()
        self._closing = BackgroundTasks()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the calls in progress, which raise RewardUnavailable, and close the channels."""
        await self._calls.cancel()
        _fail(self._pending, RewardUnavailable("reward: the client has been closed"))
        self._pending = []
        await asyncio.gather(*self._closing, *(connection.channel.close() for connection in self._connections.values()))
        self._connections.clear()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """Score finished trajectories; returns one outcome per trajectory, in order.

        Calls in the same iteration of the event loop share a request, and each returns as soon as its outcomes arrive.
        Raises RewardUnavailable if no service answers before the deadline.
        """
        loop = asyncio.get_running_loop()
        waiting = [
            _Waiting(item=score_item_to_pb(t), traceparent=t.traceparent, result=loop.create_future())
            for t in trajectories
        ]
        if waiting and not self._pending:
            loop.call_soon(self._flush)
        self._pending += waiting
        return list(await asyncio.gather(*(w.result for w in waiting)))

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        batches: list[list[_Waiting]] = []
        size = 0
        for waiting in pending:
            item_bytes = waiting.item.ByteSize()
            if not batches or len(batches[-1]) >= MOST_ITEMS_PER_CALL or size + item_bytes > MOST_BYTES_PER_CALL:
                batches.append([])
                size = 0
            batches[-1].append(waiting)
            size += item_bytes
        for batch in batches:
            self._calls.start(self._deliver(batch), "reward-call")

    async def _deliver(self, batch: list[_Waiting]) -> None:
        try:
            await self._call(batch, time.monotonic() + self._deadline_seconds)
        except asyncio.CancelledError:
            _fail(batch, RewardUnavailable("reward: the client has been closed"))
            raise
        except Exception as error:
            _fail(batch, error)

    async def _call(self, batch: list[_Waiting], deadline: float) -> None:
        """Send a batch until every item has an outcome; retries contain only the items without one."""
        attempt, reason = 0, ""
        while (remaining := deadline - time.monotonic()) > 0:
            connection = await self._least_busy()
            if connection is not None:
                connection.item_count += len(batch)
                # Built for each attempt: the token may have changed since the previous one.
                metadata = call_metadata(traceparent=batch[0].traceparent, token=self._security.sent_token)
                try:
                    await _receive(connection.stub, batch, remaining, metadata)
                    self._waits.end(_WAIT)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        # The error of an earlier attempt is more useful than the expired deadline.
                        reason = reason or f"DEADLINE_EXCEEDED: {connection.address} did not answer"
                        break
                    reason = f"{error.code().name}: {self._security.explain(error.details() or '')}"
                    if error.code() not in _RETRIED_CODES:
                        raise RewardUnavailable(f"reward: {reason}") from error
                    connection.failed = True
                    if time.monotonic() >= self._log_retry_at:  # the deadline of a call may be minutes later
                        self._log_retry_at = time.monotonic() + _LOG_SECONDS
                        get_logger("reward").warning("reward_service_not_reached", message=reason)
                finally:
                    connection.item_count -= len(batch)
                    self._retire(connection)
                batch = [waiting for waiting in batch if not waiting.result.done()]
                if not batch:
                    return
            self._waits.begin(_WAIT, f"reward service: {reason or _NONE}")
            attempt += 1
            await asyncio.sleep(min(_BACKOFF.seconds(attempt), max(0.0, deadline - time.monotonic())))
        reason = reason or _NONE
        raise RewardUnavailable(f"reward: no service answered within {self._deadline_seconds:g} s; {reason}")

    async def _least_busy(self) -> _Connection | None:
        if not self._usable() or time.monotonic() - self._read_at >= _ADDRESS_REFRESH_SECONDS:
            self._read_at = time.monotonic()
            # In a thread: a name server may be slow, and the worker's other tasks run in this loop.
            self._refresh(set(await asyncio.to_thread(self._addresses)))
        return min(self._usable(), key=lambda connection: connection.item_count, default=None)

    def _usable(self) -> list[_Connection]:
        return [connection for connection in self._connections.values() if not connection.failed]

    def _refresh(self, addresses: set[str]) -> None:
        for address in addresses - self._connections.keys():
            channel = create_channel(address, self._security)
            stub = stubs.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            self._connections[address] = _Connection(channel=channel, stub=stub, address=address)
        for address in self._connections.keys() - addresses:
            self._connections[address].failed = True
            self._retire(self._connections[address])

    def _retire(self, connection: _Connection) -> None:
        in_use = connection.item_count or self._connections.get(connection.address) is not connection
        if connection.failed and not in_use:
            del self._connections[connection.address]
            self._closing.start(connection.channel.close())


async def _receive(
    stub: stubs.RewardServiceStub, batch: Sequence[_Waiting], timeout: float, metadata: tuple[tuple[str, str], ...]
) -> None:
    call = stub.Score(pb.ScoreRequest(items=[w.item for w in batch]), timeout=timeout, metadata=metadata)
    count = 0
    try:
        async for response in call:
            if not 0 <= response.item_index < len(batch):
                raise RewardUnavailable(f"reward: item_index {response.item_index} of {len(batch)} answers")
            count += 1
            result = batch[response.item_index].result
            if not result.done():
                result.set_result(outcome_from_pb(response.outcome))
    finally:
        call.cancel()
    if any(not waiting.result.done() for waiting in batch):
        raise RewardUnavailable(f"reward: the service returned {count} outcomes for {len(batch)} answers")


def _fail(batch: Sequence[_Waiting], error: BaseException) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)


Addresses = Callable[[], Sequence[str]]
"""Function that returns the host:port of every running service; may block."""


def reward_addresses(config: RunConfig) -> Addresses:
    """Return the function that finds this run's reward services.

    Raises ConfigError if the run file gives neither an address nor a shared folder.
    """
    if config.reward.address is not None:
        return ResolvedName(config.reward.address)
    if not config.network.shared_folder:
        raise ConfigError(
            "reward.address is missing: without a shared run folder (network.shared_folder=false), set it to the "
            "host:port of a headless service, for example by ROLLMESH_REWARD__ADDRESS"
        )
    folder = Path(config.folder)
    return lambda: [endpoint.grpc for endpoint in read_endpoints(folder, "reward")]


class ResolvedName:
    """All addresses behind one ``host:port``; the last known ones while the name cannot be resolved."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._known: list[str] = []
        self._failing = False

    def __call__(self) -> Sequence[str]:
        """Resolve the name; blocks until the system's resolver returns."""
        try:
            found = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM)
        except OSError as error:
            if not self._failing:
                get_logger("reward-client").warning("reward_name_unknown", name=self._host, message=str(error))
            self._failing = True
            return self._known
        self._failing = False
        self._known = sorted({host_port(str(entry[4][0]), self._port) for entry in found})
        return self._known
