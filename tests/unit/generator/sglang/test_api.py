"""Error answers, deadlines and broken connections of the server's endpoints, over real HTTP."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import pytest
from aiohttp import web

from rollmesh.errors import DataError, EngineError, GenerationRefused
from rollmesh.generator.engines.sglang.server_api import HttpError, SglangApi
from rollmesh.runtime.addresses import free_port

from .scripted_server import Handler, serving

Serve = Callable[[Handler], Awaitable[SglangApi]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """``await serve(handler)``: an API whose every endpoint is that handler."""
    async with AsyncExitStack() as stack:

        async def start(handler: Handler) -> SglangApi:
            api = SglangApi(f"{await stack.enter_async_context(serving(handler))}/", "key")
            stack.push_async_callback(api.aclose)
            return api

        yield start


def answering(status: int, body: object) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        return web.json_response(body, status=status)

    return answer


@pytest.mark.parametrize(
    ("status", "body", "error", "message"),
    [
        (400, {"error": {"message": "too long"}}, DataError, "rejects the call: too long"),
        (400, {"error": "no ids"}, DataError, "no ids"),
        (422, {"detail": [{"loc": ["input_ids"]}]}, DataError, "input_ids"),
        (429, {"error": {"message": "queue is full"}}, GenerationRefused, "HTTP 429: queue is full"),
        (503, {"message": "shutting down"}, GenerationRefused, "shutting down"),
        (401, {"error": "Unauthorized"}, EngineError, "HTTP 401: Unauthorized"),
        (404, {"detail": "Not Found"}, EngineError, "/generate: HTTP 404: Not Found"),
        (500, {"object": "error", "message": "boom"}, EngineError, "HTTP 500: boom"),
        (200, [1, 2], EngineError, "the response is list"),
    ],
)
async def test_an_error_status_says_whose_fault_it_is(serve, status, body, error, message):
    api = await serve(answering(status, body))
    with pytest.raises(error, match=message):
        await api.generate({})


async def test_an_answer_that_is_no_json_is_an_engine_error(serve):
    async def answer(request: web.Request) -> web.Response:
        return web.Response(text="<html>")

    api = await serve(answer)
    with pytest.raises(EngineError, match="not JSON"):
        await api.generate({})


async def test_every_request_carries_the_key_and_the_body(serve):
    seen: list[tuple[str, str, str, str]] = []

    async def answer(request: web.Request) -> web.Response:
        seen.append((request.method, request.path, request.headers["Authorization"], await request.text()))
        return web.json_response({"success": True})

    api = await serve(answer)
    await api.pause("retract")
    await api.abort("r")
    assert await api.update_weights("/p/3", "3", flush=False, seconds=5.0) == ""
    await api.model_info(5.0)
    assert [s[:3] for s in seen] == [
        ("POST", "/pause_generation", "Bearer key"),
        ("POST", "/abort_request", "Bearer key"),
        ("POST", "/update_weights_from_disk", "Bearer key"),
        ("GET", "/model_info", "Bearer key"),
    ]
    assert seen[2][3] == '{"model_path":"/p/3","weight_version":"3","flush_cache":false}'


async def test_a_failed_update_is_an_answer_and_other_errors_are_not(serve):
    api = await serve(answering(400, {"success": False, "message": "no such folder"}))
    assert await api.update_weights("/p", "1", flush=True, seconds=5.0) == "no such folder"
    api = await serve(answering(500, {"message": "boom"}))
    with pytest.raises(HttpError, match="boom"):
        await api.update_weights("/p", "1", flush=True, seconds=5.0)


async def test_a_late_answer_and_a_dead_server_are_engine_errors(serve):
    release = asyncio.Event()

    async def late(request: web.Request) -> web.Response:
        await release.wait()
        return web.json_response({})

    api = await serve(late)
    with pytest.raises(EngineError, match=r"/model_info: no answer within 0\.1 s"):
        await api.model_info(0.1)
    assert not await api.ready(0.1)
    release.set()
    unreachable = SglangApi(f"http://127.0.0.1:{free_port()}", None)
    with pytest.raises(EngineError, match="cannot be reached"):
        await unreachable.generate({})
    assert not await unreachable.ready(1.0)
    await unreachable.aclose()
    with pytest.raises(EngineError, match="broke"):
        await unreachable.generate({})


async def test_a_server_that_comes_up_during_the_back_off_is_reached():
    port = free_port()
    api = SglangApi(f"http://127.0.0.1:{port}", None)
    request = asyncio.create_task(api.generate({}))
    await asyncio.sleep(0)
    async with serving(answering(200, {"ok": 1}), port):
        assert await request == {"ok": 1}
    await api.aclose()


async def test_a_request_whose_connection_breaks_is_not_made_again(serve):
    count = 0

    async def hang_up(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        request.transport.close()
        return web.Response()

    api = await serve(hang_up)
    with pytest.raises(EngineError, match="broke"):
        await api.generate({})
    assert count == 1


async def test_a_request_over_an_idle_connection_that_the_server_has_just_closed_is_sent_again():
    closed = asyncio.Event()
    connections: list[asyncio.Transport] = []

    class Answers(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            connections.append(transport)

        def data_received(self, data: bytes) -> None:
            connections[-1].write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")

        def connection_lost(self, error: Exception | None) -> None:
            closed.set()

    loop = asyncio.get_running_loop()
    server = await loop.create_server(Answers, "127.0.0.1", 0)
    api = SglangApi(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", None)
    assert await api.generate({"text": "a"}) == {}
    connections[0].close()
    await closed.wait()  # the loop has not read of the end of the connection yet
    assert await api.generate({"text": "b"}) == {}
    assert len(connections) == 2
    await api.aclose()
    server.close()
    await server.wait_closed()
