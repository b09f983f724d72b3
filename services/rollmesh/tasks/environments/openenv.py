"""Environment of an OpenEnv server (0.10): an episode is a session, a turn is a step or the call of a tool.

A session is one connection to the server's ``/ws``, on which every request has one answer.
"""

import asyncio
import json
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Literal

import aiohttp

from rollmesh.errors import ConfigError
from rollmesh.runtime.tasks import Backoff, cancel_and_wait
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, EnvironmentReply
from rollmesh.tasks.environments.turn_shape import (
    EpisodeTurns,
    TurnShape,
    UnreadableAction,
    as_text,
    check_choice,
    json_action,
    with_shape,
)
from rollmesh.tasks.verifiers.verifier_protocol import short_repr
from rollmesh.types import Prompt


@with_shape
class OpenEnvEnvironment:
    """Episode of an OpenEnv server, in a session of its own; it cannot be replayed, so a lost worker restarts it."""

    replayable = False

    def __init__(
        self,
        url: str,
        action: Literal["text", "json", "tool", "mcp"] = "text",
        field: str = "message",
        first: str = "{tools}{text}",
        tag: str = "",
        capacity_seconds: float = 30.0,
        **shape: Any,
    ) -> None:
        """Create an episode.

        ``url`` is the server's address. ``action`` is what a turn says: ``text`` for ``{field: text}``, ``json`` for an
        action as JSON, ``tool`` for a call of a tool by a step, with a reward, and ``mcp`` for a call by MCP, whose
        answer has none; a turn without a call ends an episode of tools, and is the step ``{field: text}`` of one of
        MCP. Calls are ``{"name", "arguments"}``, by default in the tag ``tool_call``. ``capacity_seconds`` bounds the
        wait for a free session, below rollout.environment_timeout_seconds. Raises ConfigError for wrong options.
        """
        check_choice("action", action, ("text", "json", "tool", "mcp"))
        self._has_tools = action in ("tool", "mcp")
        self._action, self._field, self._capacity_seconds = action, field, capacity_seconds
        self._shape = TurnShape(first=first, tag=tag or ("tool_call" if self._has_tools else ""), **shape)
        self._turns = EpisodeTurns(self._shape)
        self._session = OpenEnvSession(url)

    async def reset(self, prompt: Prompt) -> EnvironmentReply:
        seed, options = self._shape.reset_of(prompt)
        begun = await self._session.begin({"seed": seed, **options}, self._capacity_seconds)
        tools = await self._tools() if self._has_tools else ""
        return self._turns.first(self._shape.observation_text(begun["observation"]), begun["done"], tools)

    async def step(self, response_text: str, idempotency_key: str) -> EnvironmentReply:
        try:
            if not self._has_tools:
                text = self._shape.action_text(response_text)
                return await self._step(json_action(text) if self._action == "json" else {self._field: text})
            if f"<{self._shape.tag}>" in response_text:
                return await self._call(self._shape.action_text(response_text))
        except UnreadableAction as error:
            return self._turns.unread(error)
        if self._action == "mcp":
            return await self._step({self._field: response_text.strip()})
        return self._turns.reply("", None, done=True)

    async def aclose(self) -> None:
        await self._session.aclose()

    async def _step(self, action: Mapping[str, Any]) -> EnvironmentReply:
        try:
            seen = await self._session.ask("step", action, "observation")
        except OpenEnvFailed as error:
            # The session goes on after both, and the policy can learn what the environment does not take; but the
            # fields of an action may be those of the options.
            own_fields = self._action in ("text", "mcp")
            if error.code == "EXECUTION_ERROR" or (error.code == "VALIDATION_ERROR" and not own_fields):
                raise UnreadableAction(error.said) from error
            raise
        observation = seen["observation"]
        is_result = self._has_tools and "tool_name" in observation
        text = _result_text(observation) if is_result else self._shape.observation_text(observation)
        return self._turns.reply(text, seen.get("reward"), seen["done"])

    async def _call(self, text: str) -> EnvironmentReply:
        call = json_action(text)
        name, arguments = call.get("name"), call.get("arguments", {})
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise UnreadableAction("a call is a JSON object with a name, and an object of arguments")
        if self._action == "tool":
            return await self._step({"type": "call_tool", "tool_name": name, "arguments": arguments})
        answer = await self._session.call("tools/call", {"name": name, "arguments": arguments})
        return self._turns.reply(_result_text(answer), None, done=False)

    async def _tools(self) -> str:
        """Return the tools, one line of JSON each, as models are told of them. Raises EnvironmentFailed without any."""
        answer = await self._session.call("tools/list", {})
        if (tools := _listed(answer, "tools")) is None:
            raise EnvironmentFailed(f"environment: the server lists no tools: {answer.get('error')}")
        return "".join(f"{json.dumps({'type': 'function', 'function': _function(tool)})}\n" for tool in tools)


def _function(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    schema = tool.get("inputSchema", tool.get("input_schema"))
    return {"name": tool.get("name"), "description": tool.get("description"), "parameters": schema}


def _listed(answer: Mapping[str, Any], name: str) -> list[Any] | None:
    """Return a list of the result of an MCP call; None without one."""
    result = answer.get("result")
    found = result.get(name) if isinstance(result, dict) else None
    return found if isinstance(found, list) else None


def _result_text(answer: Mapping[str, Any]) -> str:
    """Return what a tool says: the texts of its result, or its error."""
    if (error := answer.get("error")) is not None:
        return f"error: {error.get('message') if isinstance(error, dict) else error}"
    if (blocks := _listed(answer, "content")) is None:
        return as_text(answer.get("result"))
    return "\n".join(as_text(block.get("text", block) if isinstance(block, dict) else block) for block in blocks)


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
