"""The teacher process: an engine with frozen weights behind gRPC, and the admin port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollmesh.config import RunConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import CheckpointError, ConfigError
from rollmesh.runtime.addresses import advertised, bind_host, host_port
from rollmesh.runtime.grpc import HealthReporter, create_server
from rollmesh.runtime.lifecycle import Shutdown, many_imports, wait_or_shutdown
from rollmesh.runtime.service_host import service_host
from rollmesh.teacher.teacher_engine import TeacherEngine
from rollmesh.teacher.teacher_metrics import TeacherMetrics
from rollmesh.teacher.teacher_model import TeacherModel, keep_digest, manifest_digest, read_teacher_model, teacher_of
from rollmesh.teacher.teacher_service import SERVICE_NAME, ServedTeacher, TeacherService
from rollmesh.v1 import teacher_service_pb2_grpc as stubs

_BEAT_SECONDS = 2.0
_DEADLINE_SECONDS = 30.0


async def serve(config: RunConfig, index: int, shutdown: Shutdown, *, name: str) -> None:
    """Score under the frozen weights of a teacher until ``shutdown``, then finish the sequences in progress.

    Raises ConfigError for a teacher that does not fit the run or has changed since it began, EngineError if the engine
    fails.
    """
    teacher_of(config, name)
    async with service_host(config, teacher_service(name), index, component="teacher") as host:
        host.publish(starting=True)
        host.health.waits.begin("engine", f"teachers.{name}: its model is loaded", after_seconds=_DEADLINE_SECONDS)
        model = await asyncio.to_thread(read_teacher_model, config, name)
        digest = await asyncio.to_thread(manifest_digest, model.folder)
        if config.network.shared_folder:
            keep_digest(config, name, digest)
        engine = await host.stack.enter_async_context(_engine(config, name, model))
        teacher = ServedTeacher(
            name=name,
            manifest_digest=digest,
            vocabulary_digest=model.vocabulary_digest,
            vocab_size=model.vocab_size,
            policy_vocab_size=model.policy_vocab_size,
            context_token_count=config.generator.max_context_tokens,
        )
        server = create_server(host.security)
        service = TeacherService(teacher, engine, TeacherMetrics(host.metrics, name))
        stubs.add_TeacherServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        reporter = HealthReporter(server, SERVICE_NAME)
        port = host.security.bind(server, host_port(bind_host(config), config.network.grpc_port))
        await server.start()
        host.stack.push_async_callback(server.stop, config.generator.drain_timeout_seconds)
        # Clients must not find the service any more when it refuses sequences: the endpoint is removed first.
        host.stack.push_async_callback(reporter.set_serving, False)
        host.publish(grpc=advertised(config, port))
        await reporter.set_serving(True)
        host.health.waits.end("engine")
        host.health.set_ready(True)
        host.health.watch("teacher", _DEADLINE_SECONDS)
        while not await wait_or_shutdown(shutdown, _BEAT_SECONDS):
            if engine.failed.done():
                engine.failed.result()
            host.health.beat("teacher")


@asynccontextmanager
async def _engine(config: RunConfig, name: str, model: TeacherModel) -> AsyncIterator[TeacherEngine]:
    """Run the embedded engine within the block."""
    with many_imports():
        import torch

        from rollmesh.teacher.embedded_engine import EmbeddedEngine
        from rollmesh.trainer.learner.distributed import pick_device
        from rollmesh.trainer.learner.policy_model import ModelSource
        from rollmesh.trainer.learner.policy_scorer import PolicyScorer

    teacher, longest = config.teachers[name], config.generator.max_context_tokens

    def load() -> PolicyScorer:
        torch.set_num_threads(config.launcher.torch_threads)
        source = ModelSource(folder=model.folder)
        loaded = source.load(dtype=getattr(torch, teacher.dtype), device=pick_device(teacher.device), longest=longest)
        scorer = PolicyScorer(loaded, teacher.tokens_per_microbatch)
        scorer.share_prefixes(longest)
        return scorer

    try:
        scorer = await asyncio.to_thread(load)
    except (CheckpointError, ConfigError) as error:
        problem = str(error).removeprefix("model.path: ")
        raise ConfigError(f"teachers.{name}.model={teacher.model}: {problem}") from error
    engine = EmbeddedEngine(scorer, teacher.tokens_per_microbatch)
    async with engine.running():
        yield engine
