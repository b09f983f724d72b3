"""The service's connection to one worker process."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from rollmesh.reward.pool.pipe_frames import LARGEST_REPLY_BYTES, FrameBuffer, FrameError, frame
from rollmesh.reward.pool.template_process import TemplateProcess

_EXIT_GRACE_SECONDS = 0.5
"""Time for a worker that closed its socket to exit by itself, so that its exit status is not that of a kill."""


class WorkerTimedOut(Exception):
    """Time-out of a worker, which was killed."""


class WorkerDied(Exception):
    """Exit of a worker before its answer."""

    def __init__(self, reason: str, *, with_template: bool = False) -> None:
        """``with_template`` is True if the template exited too, with all its workers."""
        super().__init__(reason)
        self.with_template = with_template


class WorkerConnection(asyncio.Protocol):
    """Connection that sends one request at a time to a worker, and kills it if the answer is late or invalid."""

    def __init__(self, template: TemplateProcess, pid: int) -> None:
        self._template = template
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer(LARGEST_REPLY_BYTES)
        self._answer: asyncio.Future[bytes] | None = None
        self.pid = pid
        self.closed = False
        """True once the worker has exited or must not be used any more."""
        self._ended: str | None = None

    @staticmethod
    async def open(template: TemplateProcess, slot: int) -> WorkerConnection:
        """Fork a worker and connect to it; raises TemplateLost."""
        service_end, worker_end = socket.socketpair()
        try:
            with worker_end:
                connection = WorkerConnection(template, await template.spawn(slot, worker_end))
            service_end.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=service_end)
        except BaseException:
            service_end.close()
            raise
        return connection

    async def request_answer(self, request: bytes, timeout_seconds: float) -> bytes:
        """Send one request and return its answer; WorkerTimedOut and WorkerDied mean that the worker has ended."""
        if self._transport is None or self.closed:
            raise WorkerDied(await self.end(_EXIT_GRACE_SECONDS), with_template=self._template.lost)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(frame(request))
        try:
            await asyncio.wait((answer,), timeout=timeout_seconds)
            if not answer.done():
                # This process may have been late itself: read data that the worker has sent in the meantime.
                await asyncio.sleep(0)
        finally:
            self._answer = None
        if not answer.done():
            await self.end(0.0)
            raise WorkerTimedOut(f"no answer within {timeout_seconds:g} s")
        try:
            return answer.result()
        except ConnectionError as error:
            if str(error):
                raise WorkerDied(str(error)) from error
            reason = await self.end(_EXIT_GRACE_SECONDS)
            raise WorkerDied(reason, with_template=self._template.lost) from error

    async def end(self, grace_seconds: float = 0.0) -> str:
        """Wait ``grace_seconds`` for the worker to exit, then kill it; returns a description of its exit."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._ended is None:
            status = await self._template.end(self.pid, grace_seconds)
            if status is None:
                self._ended = "its template process has ended"
            else:
                self._ended = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._ended

    @property
    def ended(self) -> bool:
        """True once ``end`` has completed."""
        return self._ended is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's transport does not subclass it

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._frames.feed(data)
        except FrameError as error:
            self._fail(f"the worker sent an invalid answer: {error}")
            return
        for payload in frames:
            if self._answer is None or self._answer.done():
                self._fail("the worker sent an answer without a request")
                return
            self._answer.set_result(payload)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError())

    def _fail(self, reason: str) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError(reason))
