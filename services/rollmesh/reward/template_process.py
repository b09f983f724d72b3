"""The template process as seen by the service: start it, spawn workers, end them, receive their exit status."""

import asyncio
import json
import socket
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from rollmesh.config.load import inherited_environment
from rollmesh.errors import ConfigError, DataError, RollmeshError
from rollmesh.reward.messages import WorkerSpec

_READ_BYTES = 1 << 16
_END_SECONDS = 5.0


class TemplateLost(Exception):
    """Exit of the template process and its workers."""


class TemplateProcess:
    """One running template, created by ``start``; a lost template is replaced, not repaired."""

    def __init__(self, process: asyncio.subprocess.Process, control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._unread = b""
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.timeout_means_wrong: Mapping[str, bool] = {}
        """Declaration of each loaded verifier, by name."""
        self.most_workers: int | None = None
        """Number of workers that can have a separate uid at once; None if workers have none."""
        self._spawning: dict[int, asyncio.Future[int]] = {}  # by slot
        self._exits: dict[int, asyncio.Future[int]] = {}  # by pid

    @staticmethod
    async def start(spec: WorkerSpec) -> "TemplateProcess":
        """Start a template and wait until its verifiers are loaded.

        Raises ConfigError or DataError, as reported by the template, if they cannot be loaded, TemplateLost if the
        template dies.
        """
        service_end, template_end = socket.socketpair()
        service_end.setblocking(False)
        environment = inherited_environment()
        # The template forks, so no library may start threads in it.
        environment |= {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}
        environment["TOKENIZERS_PARALLELISM"] = "false"
        with template_end:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",
                "-m",
                "rollmesh.reward.template",
                str(template_end.fileno()),
                pass_fds=(template_end.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env=environment,
                start_new_session=True,  # a signal to the service's group must not end it before the drain
            )
        template = TemplateProcess(process, service_end)
        asyncio.get_running_loop().add_reader(service_end.fileno(), template._read_messages)
        try:
            await asyncio.get_running_loop().sock_sendall(service_end, spec.to_json().encode() + b"\n")
            await template._ready
        except (BrokenPipeError, ConnectionResetError) as error:
            await template.aclose()
            raise TemplateLost("the template process ended while it started") from error
        except BaseException:
            await template.aclose()
            raise
        return template

    @property
    def lost(self) -> bool:
        """True once the template has exited."""
        return self._control.fileno() < 0

    async def spawn(self, slot: int, connection: socket.socket) -> int:
        """Fork a worker that serves ``connection``; returns its pid."""
        if self.lost:
            raise TemplateLost("the template process has ended")
        future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._spawning[slot] = future
        try:
            socket.send_fds(self._control, [_line({"op": "spawn", "slot": slot})], [connection.fileno()])
        except OSError as error:
            self._mark_lost()
            raise TemplateLost(f"the template process is unreachable: {error}") from error
        return await future

    async def end(self, pid: int, grace_seconds: float) -> int | None:
        """Wait ``grace_seconds`` for a worker to exit, then have it and its children killed.

        Returns its exit status (negative: killed by that signal), or None if the template is lost.
        """
        exited = self._exits.get(pid)
        if exited is None:
            return None
        try:
            try:
                return await asyncio.wait_for(asyncio.shield(exited), grace_seconds)
            except TimeoutError:
                with suppress(OSError):
                    self._control.send(_line({"op": "kill", "pid": pid}))
                return await asyncio.wait_for(asyncio.shield(exited), _END_SECONDS)
        except (TemplateLost, TimeoutError):
            return None
        finally:
            self._exits.pop(pid, None)

    async def aclose(self) -> None:
        self._mark_lost()
        try:
            await asyncio.wait_for(self._process.wait(), _END_SECONDS)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    def _read_messages(self) -> None:
        try:
            data = self._control.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._mark_lost()
            return
        *lines, self._unread = (self._unread + data).split(b"\n")
        for line in lines:
            self._handle_message(json.loads(line))

    def _handle_message(self, message: Mapping[str, Any]) -> None:
        match message["op"]:
            case "ready":
                self.timeout_means_wrong, self.most_workers = message["timeout_means_wrong"], message["most_workers"]
                self._ready.set_result(None)
            case "failed":
                kinds: dict[str, type[RollmeshError]] = {"DataError": DataError}
                self._ready.set_exception(kinds.get(message["error"], ConfigError)(message["message"]))
            case "spawned":
                self._exits[message["pid"]] = asyncio.get_running_loop().create_future()
                _set_result(self._spawning.pop(message["slot"], None), message["pid"])
            case "exited":
                _set_result(self._exits.get(message["pid"]), message["status"])

    def _mark_lost(self) -> None:
        if self.lost:
            return
        asyncio.get_running_loop().remove_reader(self._control.fileno())
        self._control.close()
        waiting: list[asyncio.Future[Any]] = [self._ready, *self._spawning.values(), *self._exits.values()]
        for future in waiting:
            if not future.done():
                future.set_exception(TemplateLost("the template process has ended"))
                future.exception()  # no warning if no task waits for this future
        self._spawning.clear()


def _set_result(future: asyncio.Future[int] | None, value: int) -> None:
    if future is not None and not future.done():
        future.set_result(value)


def _line(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message).encode() + b"\n"
