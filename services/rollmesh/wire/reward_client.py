"""The caller's side of RewardService: coalesced calls, a deadline, and patience with a service that is away."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from rollmesh.config import RunConfig
from rollmesh.errors import RewardUnavailable
from rollmesh.runtime.grpc import call_metadata, create_channel
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.types import RewardOutcome, Trajectory
from rollmesh.v1 import reward_service_pb2 as pb
from rollmesh.v1 import reward_service_pb2_grpc as stubs
from rollmesh.wire.codec import outcome_from_pb
from rollmesh.wire.reward_addresses import Addresses, reward_addresses
from rollmesh.wire.reward_messages import score_item_to_pb

MOST_ITEMS_PER_CALL = 64
MOST_BYTES_PER_CALL = 8 << 20
_FIRST_PAUSE_SECONDS = 0.05
_LONGEST_PAUSE_SECONDS = 2.0
_ADDRESSES_FRESH_SECONDS = 5.0
_COMPLAIN_SECONDS = 30.0
_AGAIN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.CANCELLED)
"""Codes after which the same call may succeed, here or at another replica; scoring twice is harmless."""


@dataclass(slots=True)
class _Line:
    channel: grpc.aio.Channel
    stub: stubs.RewardServiceStub
    address: str
    item_count: int = 0
    """Items in calls under way."""
    failed: bool = False
    """Whether it is to be closed once idle: a new channel connects at once, an old one backs off for minutes."""


@dataclass(slots=True)
class _Waiting:
    item: pb.ScoreItem
    traceparent: str
    result: asyncio.Future[RewardOutcome]


class RewardClient:
    """Scores trajectories at the least busy reward service of a run; any number of concurrent calls in one loop."""

    def __init__(
        self,
        config: RunConfig,
        *,
        addresses: Addresses | None = None,
        security: PortSecurity = OPEN,
        deadline_seconds: float = 300.0,
    ) -> None:
        """``addresses`` gives the host:port of the services; by default they are found as the run file says.

        ``deadline_seconds`` bounds a call with all its retries, the waiting behind other answers included.
        """
        self._addresses = addresses or reward_addresses(config)
        self._security = security
        self._deadline_seconds = deadline_seconds
        self._lines: dict[str, _Line] = {}
        self._read_at = -_ADDRESSES_FRESH_SECONDS
        self._complain_at = 0.0
        self._pending: list[_Waiting] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._closing: set[asyncio.Future[None]] = set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel the calls under way (they raise RewardUnavailable) and close the channels."""
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)
        _fail(self._pending, RewardUnavailable("reward: the client has been closed"))
        self._pending = []
        await asyncio.gather(*self._closing, *(line.channel.close() for line in self._lines.values()))
        self._lines.clear()

    async def score(self, trajectories: Sequence[Trajectory]) -> list[RewardOutcome]:
        """One outcome per finished trajectory, in order.

        Calls of one loop tick travel together, and each returns as soon as its own outcomes are there. Raises
        RewardUnavailable when no service answers before the deadline, DataError when a prompt's metadata cannot travel.
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
        batch: list[_Waiting] = []
        size = 0
        for waiting in pending:
            item_bytes = waiting.item.ByteSize()
            if batch and (len(batch) >= MOST_ITEMS_PER_CALL or size + item_bytes > MOST_BYTES_PER_CALL):
                self._start(batch)
                batch, size = [], 0
            batch.append(waiting)
            size += item_bytes
        if batch:
            self._start(batch)

    def _start(self, batch: list[_Waiting]) -> None:
        task = asyncio.create_task(self._deliver(batch), name="reward-call")
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _deliver(self, batch: list[_Waiting]) -> None:
        try:
            await self._call(batch, time.monotonic() + self._deadline_seconds)
        except asyncio.CancelledError:
            _fail(batch, RewardUnavailable("reward: the client has been closed"))
            raise
        except Exception as error:
            _fail(batch, error)

    async def _call(self, batch: list[_Waiting], deadline: float) -> None:
        """Outcomes reach their callers as they come; what a broken call left open goes into the next one."""
        pause, reason = _FIRST_PAUSE_SECONDS, ""
        while (remaining := deadline - time.monotonic()) > 0:
            line = await self._least_busy()
            if line is not None:
                line.item_count += len(batch)
                # Made for each try: the token may have been changed since the last one.
                metadata = call_metadata(traceparent=batch[0].traceparent, token=self._security.sent_token)
                try:
                    await _receive(line.stub, batch, remaining, metadata)
                    return
                except grpc.aio.AioRpcError as error:
                    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                        # The time is up; why an earlier try failed says more than that.
                        reason = reason or f"DEADLINE_EXCEEDED: {line.address} is silent"
                        break
                    reason = f"{error.code().name}: {self._security.explain(error.details() or '')}"
                    if error.code() not in _AGAIN:
                        raise RewardUnavailable(f"reward: {reason}") from error
                    line.failed = True
                    self._complain(reason)
                finally:
                    line.item_count -= len(batch)
                    self._retire(line)
                batch = [waiting for waiting in batch if not waiting.result.done()]
                if not batch:
                    return
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.5), max(0.0, deadline - time.monotonic())))
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        reason = reason or "none is registered"
        raise RewardUnavailable(f"reward: no service answered within {self._deadline_seconds:g} s; {reason}")

    def _complain(self, reason: str) -> None:
        """Say now and then what is being waited out: the deadline of a call may be minutes away."""
        if time.monotonic() >= self._complain_at:
            self._complain_at = time.monotonic() + _COMPLAIN_SECONDS
            get_logger("reward").warning("reward_service_not_reached", message=reason)

    async def _least_busy(self) -> _Line | None:
        if not self._usable() or time.monotonic() - self._read_at >= _ADDRESSES_FRESH_SECONDS:
            self._read_at = time.monotonic()
            # In a thread: a name server may be slow, and everything else of the worker runs in this loop.
            self._refresh(set(await asyncio.to_thread(self._addresses)))
        return min(self._usable(), key=lambda line: line.item_count, default=None)

    def _usable(self) -> list[_Line]:
        return [line for line in self._lines.values() if not line.failed]

    def _refresh(self, addresses: set[str]) -> None:
        for address in addresses - self._lines.keys():
            channel = create_channel(address, self._security)
            stub = stubs.RewardServiceStub(channel)  # type: ignore[no-untyped-call]
            self._lines[address] = _Line(channel=channel, stub=stub, address=address)
        for address in self._lines.keys() - addresses:
            self._lines[address].failed = True
            self._retire(self._lines[address])

    def _retire(self, line: _Line) -> None:
        if not line.failed or line.item_count or self._lines.get(line.address) is not line:
            return
        del self._lines[line.address]
        closing = asyncio.ensure_future(line.channel.close())
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)


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
        raise RewardUnavailable(f"reward: the service gave {count} outcomes for {len(batch)} answers")


def _fail(batch: Sequence[_Waiting], error: BaseException) -> None:
    for waiting in batch:
        if not waiting.result.done():
            waiting.result.set_exception(error)
