"""The service's end of the template process: start it, ask for workers, end them, hear how they ended."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.reward.pool.worker_spec import WorkerSpec

_HEARING_BYTES = 1 << 16
_END_SECONDS = 5.0
_PRIVATE_PREFIX = "ROLLMESH_"


class TemplateLost(Exception):
    """The template process has ended; its workers with it."""


class TemplateProcess:
    """One running template. Make it with ``start``; a lost one is not repaired but replaced."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._unread = b""
        self._ready: asyncio.Future[Mapping[str, Any]] = asyncio.get_running_loop().create_future()
        self._spawning: dict[int, asyncio.Future[int]] = {}  # by slot
        self._exits: dict[int, asyncio.Future[int]] = {}  # by pid
        self.timeout_means_wrong: Mapping[str, bool] = {}
        """By the name of each verifier that is loaded."""

    @staticmethod
    async def start(spec: WorkerSpec) -> TemplateProcess:
        """Start a template and wait until its verifiers are loaded.

        Raises ConfigError (or what else the template reports) when they cannot be, TemplateLost when it dies.
        """
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        environment = {name: value for name, value in os.environ.items() if not name.startswith(_PRIVATE_PREFIX)}
        # A template forks, so no library may start threads in it.
        environment |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        with theirs:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "rollmesh.reward.pool.template",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
            )
        template = TemplateProcess(process, ours)
        asyncio.get_running_loop().add_reader(ours.fileno(), template._hear)
        try:
            await asyncio.get_running_loop().sock_sendall(ours, spec.to_json().encode() + b"\n")
            ready = await template._ready
        except (BrokenPipeError, ConnectionResetError) as error:
            await template.aclose()
            raise TemplateLost("the template process ended while it started") from error
        except BaseException:
            await template.aclose()
            raise
        template.timeout_means_wrong = ready["timeout_means_wrong"]
        return template

    @property
    def lost(self) -> bool:
        """Whether it has ended."""
        return self._control.fileno() < 0

    async def spawn(self, slot: int, connection: socket.socket) -> int:
        """Fork a worker that talks over ``connection``; returns its pid."""
        if self.lost:
            raise TemplateLost("the template process has ended")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawning[slot] = future
        try:
            socket.send_fds(self._control, [_line({"op": "spawn", "slot": slot})], [connection.fileno()])
        except OSError as error:
            self._lose()
            raise TemplateLost(f"the template process does not listen: {error}") from error
        return await future

    async def end(self, pid: int, patience_seconds: float) -> int | None:
        """Give a worker so long to end by itself, then have it and all it started killed.

        Returns its exit status (negative: by that signal); None when the template is lost and nobody knows.
        """
        exited = self._exits.get(pid)
        if exited is None:
            return None
        try:
            try:
                return await asyncio.wait_for(asyncio.shield(exited), patience_seconds)
            except TimeoutError:
                with suppress(OSError):
                    self._control.send(_line({"op": "kill", "pid": pid}))
                return await asyncio.wait_for(asyncio.shield(exited), _END_SECONDS)
        except (TemplateLost, TimeoutError):
            return None
        finally:
            self._exits.pop(pid, None)

    async def aclose(self) -> None:
        """End the template and all workers."""
        self._lose()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _hear(self) -> None:
        try:
            data = self._control.recv(_HEARING_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._take(json.loads(line))

    def _take(self, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ready":
                self._ready.set_result(message)
            case "failed":
                kinds: dict[str, type[RollmeshError]] = {"DataError": DataError}
                self._ready.set_exception(kinds.get(message["error"], ConfigError)(message["message"]))
            case "spawned":
                self._exits[message["pid"]] = asyncio.get_running_loop().create_future()
                _settle(self._spawning.pop(message["slot"], None), message["pid"])
            case "exited":
                _settle(self._exits.get(message["pid"]), message["status"])

    def _lose(self) -> None:
        if self.lost:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._spawning.values(), *self._exits.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(TemplateLost("the template process has ended"))
                future.exception()  # whoever waits hears of it; if nobody does, that is no warning
        self._spawning.clear()


def _settle(future: asyncio.Future[int] | None, value: int) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
