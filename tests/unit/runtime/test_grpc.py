import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rollmesh.runtime.auth import Tokens
from rollmesh.runtime.grpc import HealthReporter, call_metadata, create_channel, create_server
from rollmesh.runtime.security import PortSecurity
from rollmesh.v1 import reward_service_pb2, reward_service_pb2_grpc


class Echo(reward_service_pb2_grpc.RewardServiceServicer):
    async def Score(self, request, context):
        yield reward_service_pb2.ScoreResponse()


async def test_a_call_without_the_bearer_token_is_refused_and_health_stays_open() -> None:
    server = create_server(PortSecurity(tokens=Tokens(["secret"])))
    reward_service_pb2_grpc.add_RewardServiceServicer_to_server(Echo(), server)
    reporter = HealthReporter(server, "rollmesh.v1.RewardService")
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await reporter.set_serving(True)
    channel = create_channel(f"127.0.0.1:{port}")
    try:
        stub = reward_service_pb2_grpc.RewardServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Score(reward_service_pb2.ScoreRequest()).read()
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        call = stub.Score(reward_service_pb2.ScoreRequest(), metadata=call_metadata(token="secret"))
        assert await call.read() == reward_service_pb2.ScoreResponse()
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    finally:
        await channel.close()
        await server.stop(None)
