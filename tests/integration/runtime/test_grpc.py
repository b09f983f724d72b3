import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.runtime.addresses import free_port
from rollmesh.runtime.grpc import HealthReporter, RequestInterceptor, call_metadata, create_channel, create_server
from rollmesh.runtime.port_security import PortSecurity, Tokens
from rollmesh.v1 import reward_service_pb2, reward_service_pb2_grpc


@asynccontextmanager
async def channel_to(server: grpc.aio.Server) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to the server, which serves while the block runs and reports the health of one service."""
    reporter = HealthReporter(server, "rollmesh.v1.RewardService")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await reporter.set_serving(True)
    channel = create_channel(f"127.0.0.1:{port}")
    try:
        yield channel
    finally:
        await channel.close()
        await server.stop(None)


def tracebacks(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What gRPC and asyncio have logged."""
    return [record.getMessage() for record in caplog.records if record.name.startswith(("grpc", "asyncio"))]


class Echo(reward_service_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):
        yield reward_service_pb2.ScoreResponse()


def serving(servicer: reward_service_pb2_grpc.RewardServiceServicer, *arguments: PortSecurity) -> grpc.aio.Server:
    server = create_server(*arguments)
    reward_service_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    return server


async def test_a_call_without_the_bearer_token_is_refused_and_health_stays_open() -> None:
    async with channel_to(serving(Echo(), PortSecurity(tokens=Tokens(["secret"])))) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Score(reward_service_pb2.ScoreRequest()).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.Score(reward_service_pb2.ScoreRequest(), metadata=call_metadata(token="secret"))
        assert await call.read() == reward_service_pb2.ScoreResponse()
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        watched = await health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()).read()
        assert watched.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_proxy_of_the_environment_is_not_asked_for_a_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(name, f"http://127.0.0.1:{free_port()}")  # no proxy is there
    for name in ("no_grpc_proxy", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with channel_to(create_server()) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_malformed_health_requests_are_invalid_arguments_and_leave_no_traceback(
    capsys, caplog: pytest.LogCaptureFixture
) -> None:
    async with channel_to(create_server()) as channel:
        for method in ("Check", "Watch"):
            for _ in range(20):
                with pytest.raises(grpc.aio.AioRpcError) as refused:
                    await channel.unary_stream(f"/grpc.health.v1.Health/{method}")(b"\xff\xff").read()
                assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        with pytest.raises(grpc.aio.AioRpcError) as unknown:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service="none"))
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
    assert tracebacks(caplog) == []
    lines = [line for line in capsys.readouterr().out.splitlines() if "request_refused" in line]
    assert 2 <= len(lines) < 20


class Slow(reward_service_pb2_grpc.RewardServiceServicer):
    """Refuses its calls once their clients have hung up."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.refused = 0

    async def Score(self, request, context):
        self.entered.set()
        try:
            # As a handler that the cancellation reaches between its last await and its refusal.
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.refused += 1
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "items: empty")
        yield


async def test_a_client_that_hangs_up_before_it_is_refused_leaves_no_traceback(
    capsys, caplog: pytest.LogCaptureFixture
) -> None:
    servicer = Slow()
    async with channel_to(serving(servicer)) as channel:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        for count in range(1, 4):
            servicer.entered.clear()
            call = stub.Score(reward_service_pb2.ScoreRequest())
            await servicer.entered.wait()
            call.cancel()
            while servicer.refused < count:
                await asyncio.sleep(0.01)
    assert tracebacks(caplog) == []
    assert "request_failed" not in capsys.readouterr().out


class Failing(reward_service_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):
        if request.items:
            raise ZeroDivisionError("a fault of the service")
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "items: empty")
        yield


async def test_refused_requests_have_their_status_and_share_a_log_line_a_second(capsys) -> None:
    now = 100.0
    server = grpc.aio.server(interceptors=[RequestInterceptor(lambda: now)])
    reward_service_pb2_grpc.add_RewardServiceServicer_to_server(Failing(), server)
    method = "/rollmesh.v1.RewardService/Score"

    async def ask(channel: grpc.aio.Channel, data: bytes) -> grpc.StatusCode:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_stream(method)(data).read()
        return refused.value.code()

    empty = reward_service_pb2.ScoreRequest().SerializeToString()
    full = reward_service_pb2.ScoreRequest(items=[reward_service_pb2.ScoreItem()]).SerializeToString()
    async with channel_to(server) as channel:
        assert {await ask(channel, b"\xff\xff") for _ in range(20)} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert {await ask(channel, empty) for _ in range(20)} == {grpc.StatusCode.INVALID_ARGUMENT}
        assert {await ask(channel, full) for _ in range(20)} == {grpc.StatusCode.INTERNAL}
        now += 1.0
        await ask(channel, empty)
    lines = [
        line for line in capsys.readouterr().out.splitlines() if "request_refused" in line or "request_failed" in line
    ]
    assert len(lines) == 3, lines
    assert "malformed" in lines[0] and "suppressed=0" in lines[0]
    assert "request_failed" in lines[1]
    assert "suppressed=39" in lines[2] and "items: empty" in lines[2]
