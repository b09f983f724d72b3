"""The service's end of one worker process."""

from __future__ import annotations

import asyncio
import socket
from typing import cast

from rollmesh.reward.pool.pipe_frames import LARGEST_REPLY_BYTES, FrameBuffer, FrameError, frame
from rollmesh.reward.pool.template_process import TemplateProcess

_PATIENCE_SECONDS = 0.5
"""A worker that closed its socket is given so long to be gone, so that its exit status is its own."""


class WorkerTimedOut(Exception):
    """The worker did not answer in time and was killed."""


class WorkerDied(Exception):
    """The worker ended before it answered."""

    def __init__(self, reason: str, *, with_template: bool = False) -> None:
        """``with_template``: the template ended too, and all its workers with it."""
        super().__init__(reason)
        self.with_template = with_template


class WorkerConnection(asyncio.Protocol):
    """Sends one request at a time to a worker and kills it when the answer is late or no answer at all."""

    def __init__(self, template: TemplateProcess) -> None:
        self._template = template
        self._transport: asyncio.Transport | None = None
        self._frames = FrameBuffer(LARGEST_REPLY_BYTES)
        self._answer: asyncio.Future[bytes] | None = None
        self.pid = 0
        self.closed = False
        """Whether the worker has ended, or is as good as ended."""
        self._ended: str | None = None

    @staticmethod
    async def open(template: TemplateProcess, slot: int) -> WorkerConnection:
        """Fork a worker and connect to it; raises TemplateLost."""
        ours, theirs = socket.socketpair()
        connection = WorkerConnection(template)
        try:
            with theirs:
                connection.pid = await template.spawn(slot, theirs)
            ours.setblocking(False)
            await asyncio.get_running_loop().create_unix_connection(lambda: connection, sock=ours)
        except BaseException:
            ours.close()
            raise
        return connection

    async def ask(self, request: bytes, timeout_seconds: float) -> bytes:
        """One request, one answer; raises WorkerTimedOut or WorkerDied, and the worker is gone then."""
        if self._transport is None or self.closed:
            raise WorkerDied(await self.end(_PATIENCE_SECONDS), with_template=self._template.lost)
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._answer = answer
        self._transport.write(frame(request))
        try:
            await asyncio.wait((answer,), timeout=timeout_seconds)
            if not answer.done():
                # This process may have been the late one: take in what the worker has sent meanwhile.
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
            reason = await self.end(_PATIENCE_SECONDS)
            raise WorkerDied(reason, with_template=self._template.lost) from error

    async def end(self, patience_seconds: float = 0.0) -> str:
        """Let the worker end, or kill it and all it started; returns how it ended."""
        self.closed = True
        if self._transport is not None:
            self._transport.abort()
        if self._ended is None:
            status = await self._template.end(self.pid, patience_seconds)
            if status is None:
                self._ended = "the process that started it has ended"
            else:
                self._ended = f"killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return self._ended

    @property
    def ended(self) -> bool:
        """Whether ``end`` has been through."""
        return self._ended is not None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one without saying so

    def data_received(self, data: bytes) -> None:
        try:
            frames = self._frames.feed(data)
        except FrameError as error:
            self._fail(f"the worker sent what is no answer: {error}")
            return
        for payload in frames:
            if self._answer is None or self._answer.done():
                self._fail("the worker sent an answer that nobody asked for")
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
