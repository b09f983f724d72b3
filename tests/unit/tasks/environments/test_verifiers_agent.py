"""Faults of an environment server of verifiers: each costs its own rollout, by an error that names the cause."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgpack
import pytest
import zmq
import zmq.asyncio

from rollmesh.errors import ConfigError
from rollmesh.tasks.environments.environment_protocol import EnvironmentFailed, load_agent

from ....kit.waiting import reached

ROW = {
    "task": {"task_data": json.dumps({"prompt": "?"})},
    "base_url": "u",
    "model": "m",
    "temperature": 1.0,
    "top_p": 0.9,
}
AGENT = {"name": "agent", "trainable": True, "config": {"client": {"base_url": "u"}}}
REWARDS = {"right": {"score": 0.5, "weight": 2.0}, "style": {"score": 3.0, "weight": 0.1}, "unknown": None}
TRACE = {"agent": AGENT, "rewards": REWARDS, "metrics": {"turns": 2.0, "rate": float("nan")}}
HEAD = {"ok": True, "errors": []}


class Router:
    """Server side of the protocol; a test says what it answers to a run."""

    def __init__(self, socket: zmq.asyncio.Socket) -> None:
        self.socket = socket
        self.asked: list[tuple[bytes, bytes, Any]] = []
        self.healthy = True

    async def answer(self, client: bytes, request: bytes, kind: str, body: Any) -> None:
        await self.socket.send_multipart([client, request, kind.encode(), msgpack.packb(body)])

    async def serve(self, run: "Callable[[Router, bytes, bytes], Awaitable[None]]") -> None:
        while True:
            client, request, method, body = await self.socket.recv_multipart()
            self.asked.append((request, method, msgpack.unpackb(body)))
            if method == b"health" and self.healthy:
                await self.answer(client, request, "reply", {"success": True})
            elif method == b"run":
                await run(self, client, request)


@asynccontextmanager
async def router(run: Callable[[Router, bytes, bytes], Awaitable[None]]) -> AsyncIterator[tuple[Router, str]]:
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        serving = Router(socket)
        task = asyncio.create_task(serving.serve(run))
        yield serving, f"tcp://127.0.0.1:{port}"
        task.cancel()
        await asyncio.wait([task])


def rollout(address: str, row: Any = ROW, seconds: float = 0.5) -> Awaitable[Any]:
    return load_agent("verifiers", {"address": address, "silent_seconds": seconds})(None, row)


def answering(*traces: dict[str, Any], head: Any = HEAD, version: int = 1, **reply: Any) -> Any:
    async def run(server: Router, client: bytes, request: bytes) -> None:
        for number, trace in enumerate(traces):
            opened = {"trace": f"t{number}", "open": {"version": version}, "set": {"rewards": {}}}
            await server.answer(client, request, "delta", opened)
            await server.answer(client, b"of another run", "delta", {"trace": f"t{number}", "set": {"rewards": {}}})
            await server.answer(client, request, "delta", {"trace": f"t{number}", "set": trace})
        summaries = [{"id": f"t{number}"} for number in range(len(traces))]
        await server.answer(client, b"of another run", "reply", {"success": False, "error": "not yours"})
        body = {"success": True, "error": None, "head": head, "traces": summaries} | reply
        await server.answer(client, request, "reply", body)

    return run


async def test_the_reward_is_the_weighted_sum_and_answers_to_others_do_not_count() -> None:
    async with router(answering(TRACE)) as (server, address):
        # 0.5 * 2 + 3 * 0.1; a metric that is no number is left out
        assert await rollout(address) == {
            "reward": pytest.approx(1.3),
            "parts": {"right": 0.5, "style": 3.0, "turns": 2.0},
        }
    assert [method for _, method, _ in server.asked] == [b"health", b"run"]
    request = server.asked[1][2]
    assert request["task_data"] == {"prompt": "?"} and request["model"] == "m"
    assert request["client"] == {"type": "eval", "base_url": "u", "api_key_var": "ROLLMESH_API_KEY"}
    assert request["sampling"] == {"temperature": 1.0, "top_p": 0.9}


async def frames(server: Router, client: bytes, request: bytes) -> None:
    await server.socket.send_multipart([client, request, msgpack.packb({"success": True})])


async def no_map(server: Router, client: bytes, request: bytes) -> None:
    await server.answer(client, request, "reply", "done")


async def other_kind(server: Router, client: bytes, request: bytes) -> None:
    await server.answer(client, request, "progress", {})


async def torn(server: Router, client: bytes, request: bytes) -> None:
    await server.socket.send_multipart([client, request, b"reply", b"\xda\xff"])


async def silent(server: Router, client: bytes, request: bytes) -> None:
    server.healthy = False


USER = {"name": "user", "trainable": False, "config": {"client": {"base_url": "u"}}}
ERROR = {"type": "ToolsetError", "message": "no tool"}


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (frames, r"sent 2 frames .*protocol of verifiers 0\.4"),
        (no_map, r"sent a str of the kind b'reply'; this adapter speaks"),
        (other_kind, r"kind b'progress'"),
        (torn, r"sent 3 frames"),
        (silent, r"has been silent for 0\.5 s"),
        (answering(TRACE, version=2), r"traces of version 2"),
        (answering(success=False, error="ValidationError: sampling"), r"refused the episode: ValidationError"),
        (answering({"agent": AGENT}, head={}), r"sent what is no episode \(KeyError: 'ok'\)"),
        (answering(TRACE, traces=[{"id": "unseen"}]), r"no episode \(KeyError: 'unseen'\)"),
        (answering(TRACE | {"errors": [ERROR]}, head={"ok": False, "errors": []}), r"failed: ToolsetError: no tool"),
        (answering(head={"ok": False, "errors": []}), r"failed: it does not say why"),
        (answering(TRACE | {"rewards": {"right": None}}), r"no reward: no method of its task has @vf\.reward"),
        (answering(TRACE, TRACE), r"one agent, but these used it: agent, agent"),
        (answering(TRACE, TRACE | {"agent": USER}), r"these used it: agent, user; give every other agent a client"),
        (answering(), r"these used it: none"),
    ],
)
async def test_a_fault_of_the_server_is_an_error_that_names_it(run: Any, message: str) -> None:
    async with router(run) as (_, address):
        with pytest.raises(EnvironmentFailed, match=message):
            await rollout(address)


async def test_a_server_that_is_not_there_is_waited_for() -> None:
    async with router(answering(TRACE)) as (_, address):
        pass
    with pytest.raises(EnvironmentFailed, match=f"at {address} has not answered for 0.5 s"):
        await rollout(address)
    waiting = asyncio.ensure_future(rollout(address, seconds=60.0))
    await asyncio.sleep(0)
    with zmq.asyncio.Context.instance().socket(zmq.ROUTER) as socket:
        socket.linger = 0
        socket.bind(address)
        serving = asyncio.create_task(Router(socket).serve(answering(TRACE)))
        assert (await waiting)["reward"] == pytest.approx(1.3)
        serving.cancel()
        await asyncio.wait([serving])


async def test_a_rollout_that_is_cancelled_cancels_its_episode() -> None:
    started = asyncio.Event()

    async def run(server: Router, client: bytes, request: bytes) -> None:
        started.set()

    async with router(run) as (server, address):
        task = asyncio.ensure_future(rollout(address, seconds=60.0))
        await started.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await reached(lambda: cancelled(server), "the server is told", 60.0)
    (run_id,) = [request for request, method, _ in server.asked if method == b"run"]
    assert server.asked[-1][2] == {"request_id": run_id.decode()}


async def cancelled(server: Router) -> bool:
    return server.asked[-1][1] == b"cancel"


@pytest.mark.parametrize("task", [{}, {"task_data": None}, {"task_data": "{"}])
async def test_a_row_without_task_data_names_the_field(task: dict[str, Any]) -> None:
    with pytest.raises(EnvironmentFailed, match="task_data of the row must be the JSON text of a task's data"):
        await rollout("tcp://127.0.0.1:1", ROW | {"task": task})


def test_options_are_checked_at_the_start() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.agent\.function_options: verifiers rejects .*'port': 1"):
        load_agent("verifiers", {"address": "tcp://h:1", "port": 1})
    with pytest.raises(ConfigError, match=r"address='h:1', expected tcp://HOST:PORT"):
        load_agent("verifiers", {"address": "h:1"})
    with pytest.raises(ConfigError, match=r"rollout\.agent\.function: 'verifier' is not one of verifiers"):
        load_agent("verifier", {})
