"""Agent whose rollouts an environment server of the package verifiers makes, in a process of its own.

The server (``verifiers.v1.serve``) is a ZMQ router. A request is the frames [request id, method, msgpack]; it answers
[request id, kind, msgpack], any number of times with the kind ``delta`` and then once with ``reply``. Deltas bring the
traces of the episode as they grow; the reply has what belongs to the whole of it. The environment's model calls go to
the base URL of the session, which records them.
"""

import asyncio
import json
import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed

try:
    import msgpack
    import zmq
    import zmq.asyncio
except ModuleNotFoundError as error:
    raise ConfigError(
        f"rollout.agent.function=verifiers: needs the package {error.name}: pip install 'rollmesh[verifiers]'"
    ) from error

KEY_VARIABLE = "ROLLMESH_API_KEY"
"""Environment variable of the server with the run's token. It strips names with API_KEY from what its agents run."""
_TRACE_VERSION = 1
"""Schema of the traces that verifiers 0.4 writes."""
_SPOKEN = "this adapter speaks the protocol of verifiers 0.4"
_ASK_SECONDS = 2.0
"""Wait for a server that starts, before it is asked again whether it is there."""
_LINGER_MILLISECONDS = 1000
"""Time for the last message of a socket that is closed."""


class VerifiersAgent:
    """Agent function: the episode of a row's ``task_data``, and its rewards and metrics."""

    def __init__(self, *, address: str, silent_seconds: float = 60.0) -> None:
        """``address``: that of the server, tcp://HOST:PORT. A server silent for longer than ``silent_seconds`` is lost.

        A server that is not there counts as silent, so a rollout waits as long for one that restarts.
        """
        if not isinstance(address, str) or not address.startswith(("tcp://", "ipc://")):
            raise ConfigError(f"rollout.agent.function_options: address={address!r}, expected tcp://HOST:PORT")
        self._address = address
        self._silent_seconds = float(silent_seconds)

    async def __call__(self, client: Any, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the body of the reward call. Raises EnvironmentFailed if the server made no reward."""
        try:
            task_data = json.loads(row["task"]["task_data"])  # a text keeps the order of its keys
        except (KeyError, TypeError, ValueError) as error:
            raise EnvironmentFailed(
                f"task_data of the row must be the JSON text of a task's data, which the command in "
                f"docs/environments.md writes ({type(error).__name__}: {error})"
            ) from error
        server = _Server(self._address, self._silent_seconds)
        try:
            await server.reach()
            return await server.run(
                {
                    "task_data": task_data,
                    "client": {"type": "eval", "base_url": row["base_url"], "api_key_var": KEY_VARIABLE},
                    "model": row["model"],
                    # A harness that asks for others would be refused.
                    "sampling": {"temperature": row["temperature"], "top_p": row["top_p"]},
                }
            )
        finally:
            server.close()


@dataclass
class _Episode:
    """State of one run, from its messages."""

    base_url: str
    """Address of the session."""
    traces: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Traces by id, without their messages and tokens."""

    def add(self, delta: dict[str, Any]) -> None:
        if delta.get("discard"):
            self.traces.pop(delta["trace"], None)
            return
        trace = self.traces.setdefault(delta["trace"], {"errors": []})
        trace.update(delta.get("open", {}))
        trace.update(delta.get("set", {}))
        trace["errors"] += delta.get("errors", [])

    def reward(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Return the body of the reward call: the weighted rewards of the agent that is trained, and its metrics."""
        head, traces = reply["head"], [self.traces[summary["id"]] for summary in reply["traces"]]
        if versions := sorted({trace["version"] for trace in traces} - {_TRACE_VERSION}):
            raise EnvironmentFailed(f"the episode has traces of version {versions[0]}; {_SPOKEN}")
        if not head["ok"]:
            errors = [*head["errors"], *(error for trace in traces for error in trace["errors"])]
            said = f"{errors[-1]['type']}: {errors[-1]['message']}" if errors else "it does not say why"
            raise EnvironmentFailed(f"the episode failed: {said}")
        recorded = [
            trace for trace in traces
            if trace["agent"]["trainable"] or trace["agent"]["config"]["client"]["base_url"] == self.base_url
        ]  # fmt: skip
        if len(recorded) != 1 or not recorded[0]["agent"]["trainable"]:
            names = ", ".join(trace["agent"]["name"] for trace in recorded)
            raise EnvironmentFailed(
                f"the session is the conversation of one agent, but these used it: {names or 'none'}; give every other "
                "agent a client of its own (env.AGENT.client)"
            )
        rewards = {name: each for name, each in recorded[0]["rewards"].items() if each is not None}
        if not rewards:
            raise EnvironmentFailed("the episode has no reward: no method of its task has @vf.reward")
        parts = recorded[0]["metrics"] | {name: each["score"] for name, each in rewards.items()}
        return {
            "reward": sum(each["score"] * each["weight"] for each in rewards.values()),
            "parts": {name: value for name, value in parts.items() if value is not None and math.isfinite(value)},
        }


class _Server:
    """Connection of one episode: the server does not know it any more once it has broken."""

    def __init__(self, address: str, silent_seconds: float) -> None:
        self._name = f"the environment server at {address}"
        self._silent_seconds = silent_seconds
        self._socket = zmq.asyncio.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, _LINGER_MILLISECONDS)
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        self._poller = zmq.asyncio.Poller()
        self._poller.register(self._socket, zmq.POLLIN)

    async def reach(self) -> None:
        """Wait until the server answers. Raises EnvironmentFailed if it does not."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._silent_seconds
        await self._send(b"health", {})
        while await self._answer(min(_ASK_SECONDS, self._silent_seconds)) is None:
            if loop.time() >= deadline:
                raise EnvironmentFailed(f"{self._name} has not answered for {self._silent_seconds:g} s")
            await self._send(b"health", {})
        while await self._monitor.poll(0):  # connections that broke before this one
            await self._monitor.recv_multipart()
        self._poller.register(self._monitor, zmq.POLLIN)

    async def run(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reward of the episode; the server is told to end it if this ends first."""
        episode, run = _Episode(request["client"]["base_url"]), await self._send(b"run", request)
        asked = replied = False
        try:
            while True:
                answer = await self._answer(self._silent_seconds / 2)
                if answer is None:
                    if asked:
                        raise EnvironmentFailed(f"{self._name} has been silent for {self._silent_seconds:g} s")
                    # A long turn of the model or of a tool is silent, too: then the server itself answers.
                    await self._send(b"health", {})
                    asked = True
                    continue
                asked = False
                request_id, kind, body = answer
                if request_id != run:
                    continue
                if kind == b"delta":
                    episode.add(body)
                    continue
                replied = True
                if not body["success"]:
                    raise EnvironmentFailed(f"{self._name} refused the episode: {body['error']}")
                return episode.reward(body)
        except (AttributeError, KeyError, TypeError) as error:
            raise EnvironmentFailed(
                f"{self._name} sent what is no episode ({type(error).__name__}: {error}); {_SPOKEN}"
            ) from error
        finally:
            if not replied:
                await self._send(b"cancel", {"request_id": run.decode()})

    async def _send(self, method: bytes, body: Mapping[str, Any]) -> bytes:
        request_id = uuid.uuid4().hex.encode()
        await self._socket.send_multipart([request_id, method, msgpack.packb(body)])
        return request_id

    async def _answer(self, seconds: float) -> tuple[bytes, bytes, dict[str, Any]] | None:
        """Return the id, the kind and the body of the next answer, or None. Raises EnvironmentFailed."""
        ready = dict(await self._poller.poll(math.ceil(seconds * 1000)))
        if self._socket not in ready:
            if ready:
                raise EnvironmentFailed(f"{self._name} was lost in the middle of the episode")
            return None
        frames = await self._socket.recv_multipart()
        try:
            request_id, kind, packed = frames
            body = msgpack.unpackb(packed, strict_map_key=False)
        except ValueError as error:  # that of msgpack is one, too
            raise EnvironmentFailed(f"{self._name} sent {len(frames)} frames ({error}); {_SPOKEN}") from error
        if kind not in (b"delta", b"reply") or not isinstance(body, dict):
            raise EnvironmentFailed(f"{self._name} sent a {type(body).__name__} of the kind {kind!r}; {_SPOKEN}")
        return request_id, kind, body

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
