"""Emulated teacher of the scale bench: the real service and contract over an engine without a model."""

import asyncio
from pathlib import Path

import numpy as np

from benchmarks.scale_processes import TEACHER, known_scores
from rollmesh.config import RunConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.recipes.countdown.tokenizer import VOCABULARY_SIZE
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.lifecycle import Shutdown
from rollmesh.runtime.service_host import service_host
from rollmesh.teacher.teacher_engine import ScoreRequest, TokenScores
from rollmesh.teacher.teacher_model import TeacherModel
from rollmesh.teacher.teacher_service import TeacherMetrics, TeacherService
from rollmesh.v1 import teacher_service_pb2_grpc as stubs


class EmulatedScores:
    """Engine that returns known scores at once."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def score(self, request: ScoreRequest) -> TokenScores:
        """Score a sequence."""
        response = request.token_ids[request.prompt_token_count :]
        none = np.empty((len(response), 0), np.float32)
        return TokenScores(logprobs=known_scores(response), top_ids=none.astype(np.int32), top_logprobs=none)


async def serve_teacher(config: RunConfig, shutdown: Shutdown) -> None:
    """Serve the emulated teacher until ``shutdown``."""
    async with service_host(config, teacher_service(TEACHER), 0, component="teacher") as host:
        teacher = TeacherModel(
            name=TEACHER,
            folder=Path(config.folder),
            vocabulary_digest="",
            vocab_size=VOCABULARY_SIZE,
            policy_vocab_size=VOCABULARY_SIZE,
            context_token_count=config.generator.max_context_tokens,
        )
        server = create_server()
        service = TeacherService(teacher, "0" * 64, EmulatedScores(), TeacherMetrics(host.metrics, TEACHER))
        stubs.add_TeacherServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        host.stack.push_async_callback(server.stop, None)
        host.publish(grpc=f"127.0.0.1:{port}")
        host.health.set_ready(True)
        await shutdown.wait()
