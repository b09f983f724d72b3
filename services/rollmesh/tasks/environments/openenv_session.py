"""Session of an OpenEnv 0.10 server: one connection to its ``/ws``, on which every request has one answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from rollmesh.errors import ConfigError
from rollmesh.runtime.tasks import Backoff, cancel_and_wait
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed
from rollmesh.tasks.verifiers.verifier_protocol import short_repr


class OpenEnvFailed(EnvironmentFailed):
    """A session ended; ``code`` is the server's, or UNREACHABLE, CLOSED, OUT_OF_ORDER or OTHER_PROTOCOL."""

    def __init__(self, url: str, code: str, message: str) -> None:
        super().__init__(f"environment: {url}: {message} ({code})")
        self.code, self.said = code, message


class OpenEnvSession:
    """Connection to a server that is given by its address."""

    def __init__(self, url: str) -> None:
        if not str(url).startswith(("http://", "https://", "ws://", "wss://")):
            raise ConfigError(f"rollout.environment_options.url: {url!r}: expected http://HOST:PORT or https://HOST")
        self._url = f"{url.rstrip('/').removesuffix('/ws')}/ws"
        self._client: aiohttp.ClientSession | None = None
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._incoming: asyncio.Task[aiohttp.WSMessage] | None = None
        self._last_id = 0

    async def begin(self, data: Mapping[str, Any], capacity_seconds: float) -> Mapping[str, Any]:
        """Connect and reset; while all sessions of the server are taken, try again for so many seconds."""
        backoff, attempts = Backoff(first_seconds=0.1, longest_seconds=2.0, jitter=0.5), 0
        deadline = time.monotonic() + capacity_seconds
        while True:
            await self._connect()
            try:
                return await self.ask("reset", data, "observation")
            except OpenEnvFailed as error:
                if error.code != "CAPACITY_REACHED":
                    raise
                pause = backoff.seconds(attempts := attempts + 1)
                if time.monotonic() + pause > deadline:
                    full = f"all sessions were taken for {capacity_seconds:g} s; raise the server's max_concurrent_envs"
                    # It may have room later: no error of the run file that a trial finds.
                    raise OpenEnvFailed(self._url, error.code, f"{full}, or lower schedule.pool_size") from TimeoutError
            await self.aclose()
            await asyncio.sleep(pause)

    async def ask(self, kind: str, data: Mapping[str, Any], answer: str) -> Mapping[str, Any]:
        """Send a request and return the data of its answer. Raises OpenEnvFailed."""
        assert self._socket is not None and self._incoming is not None
        unasked = self._incoming.done()
        if not unasked:
            # The server may close after an error; the error is read then.
            with suppress(aiohttp.ClientConnectionResetError):
                await self._socket.send_json({"type": kind, "data": data})
        message = await self._incoming
        self._incoming = asyncio.create_task(self._socket.receive())
        received, said = self._read(message, kind)
        if unasked or received != answer:
            what = "with nothing asked" if unasked else f"to a {kind}"
            raise OpenEnvFailed(self._url, "OUT_OF_ORDER", f"the server answers {what} by a message {received!r}")
        return said

    async def call(self, method: str, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Make a JSON-RPC call of MCP; returns its answer with ``result`` or ``error``."""
        self._last_id += 1
        call = {"jsonrpc": "2.0", "id": self._last_id, "method": method, "params": params}
        answer = await self.ask("mcp", call, "mcp")
        if answer.get("id") != self._last_id:
            message = f"the answer to call {self._last_id} has the id {short_repr(answer.get('id'))}"
            raise OpenEnvFailed(self._url, "OUT_OF_ORDER", message)
        return answer

    async def aclose(self) -> None:
        """Close the connection, which ends the session on the server."""
        if self._incoming is not None:
            await cancel_and_wait(self._incoming)
        for each in (self._socket, self._client):
            if each is not None:
                await each.close()

    async def _connect(self) -> None:
        self._client = aiohttp.ClientSession()
        try:
            limits: Any = {"max_msg_size": 100 << 20, "timeout": aiohttp.ClientWSTimeout(ws_close=1.0)}  # as OpenEnv's
            self._socket = await self._client.ws_connect(self._url, **limits)
        except aiohttp.WSServerHandshakeError as error:
            raise OpenEnvFailed(self._url, "OTHER_PROTOCOL", f"HTTP {error.status}: no OpenEnv server") from error
        except (aiohttp.ClientError, OSError) as error:
            raise OpenEnvFailed(self._url, "UNREACHABLE", f"{error or type(error).__name__}") from error
        self._incoming = asyncio.create_task(self._socket.receive())

    def _read(self, message: aiohttp.WSMessage, kind: str) -> tuple[str, Mapping[str, Any]]:
        """Return the type and the data of a message. Raises OpenEnvFailed for an error and for anything else."""
        if message.type is not aiohttp.WSMsgType.TEXT:
            gone = f"the connection ended ({message.type.name}) before the answer to a {kind}: the episode is lost"
            raise OpenEnvFailed(self._url, "CLOSED", gone)
        try:
            answer = json.loads(message.data)
            received, data = answer["type"], {**answer["data"]}
            if received == "observation" and not (type(data["observation"]) is dict and type(data["done"]) is bool):
                raise ValueError("an observation is an object and done or not")
        except (ValueError, RecursionError, TypeError, KeyError) as error:
            strange = f"{short_repr(message.data)} is no answer of OpenEnv 0.10 to a {kind}"
            raise OpenEnvFailed(self._url, "OTHER_PROTOCOL", strange) from error
        if received == "error":
            detail = f": {short_repr(data['errors'])}" if "errors" in data else ""
            raise OpenEnvFailed(self._url, str(data.get("code")), f"{kind}: {data.get('message')}{detail}")
        return received, data
