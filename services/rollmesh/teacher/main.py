"""The teacher process: an engine with frozen weights behind gRPC, and the admin port."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import CheckpointError, ConfigError, DataError
from rollmesh.runtime.grpc import create_server
from rollmesh.runtime.lifecycle import Shutdown, many_imports, wait_or_shutdown
from rollmesh.runtime.service_host import service_host
from rollmesh.teacher.teacher_engine import ScoreRequest, TeacherEngine, check_scores
from rollmesh.teacher.teacher_model import TeacherModel, keep_digest, manifest_digest, read_teacher_model, teacher_of
from rollmesh.teacher.teacher_service import SERVICE_NAME, TeacherMetrics, TeacherService
from rollmesh.v1 import teacher_service_pb2_grpc as stubs

if TYPE_CHECKING:
    from rollmesh.teacher.embedded_engine import EmbeddedEngine

_BEAT_SECONDS = 2.0
_DEADLINE_SECONDS = 30.0
_TRIAL_TOKENS = 8


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
        engine = await host.stack.enter_async_context(_engine(config, index, model))
        server = create_server(host.security)
        metrics = TeacherMetrics(host.metrics, name)
        service = TeacherService(model, digest, engine, metrics)
        stubs.add_TeacherServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
        await host.serve_grpc(server, SERVICE_NAME)
        host.health.waits.end("engine")
        host.health.set_ready(True)
        host.health.watch("teacher", _DEADLINE_SECONDS)
        while not await wait_or_shutdown(shutdown, _BEAT_SECONDS):
            if engine.failed.done():
                engine.failed.result()
            metrics.note_busy()
            host.health.beat("teacher")


@asynccontextmanager
async def _engine(config: RunConfig, index: int, model: TeacherModel) -> AsyncIterator[TeacherEngine]:
    """Run the engine of the run file within the block, after it has scored a sequence."""
    if config.teachers[model.name].engine == "sglang":
        from rollmesh.teacher.served_engine import ServedEngine, server_options

        served = ServedEngine(server_options(config, model.name, index), model.name)
        running: AbstractAsyncContextManager[None] = served.running(model.folder)
        engine: TeacherEngine = served
    else:
        embedded = await _embedded(config, model)
        engine, running = embedded, embedded.running()
    async with running:
        await _try(engine, config, model)
        yield engine


async def _try(engine: TeacherEngine, config: RunConfig, model: TeacherModel) -> None:
    """Score a short sequence as the run will. Raises ConfigError if that gives no scores."""
    name, longest = model.name, model.context_token_count
    teacher = config.teachers[name]
    ids = np.arange(min(_TRIAL_TOKENS, model.vocab_size, longest), dtype=np.int32)
    request = ScoreRequest(
        token_ids=ids, prompt_token_count=1, temperature=config.rollout.temperature, top_k=teacher.top_k
    )
    try:
        check_scores(await engine.score(request), request, model.policy_vocab_size)
    except DataError as error:
        raise ConfigError(
            f"teachers.{name}: its engine={teacher.engine} gives no scores of a short sequence: {error}; check the "
            f"weights of teachers.{name}.model={teacher.model}, or use the other engine"
        ) from error


async def _embedded(config: RunConfig, model: TeacherModel) -> "EmbeddedEngine":
    """Load the weights. Raises ConfigError for a model that cannot be loaded."""
    with many_imports():
        import torch

        from rollmesh.teacher.embedded_engine import EmbeddedEngine
        from rollmesh.trainer.learner.distributed import pick_device
        from rollmesh.trainer.learner.policy_model import ModelSource
        from rollmesh.trainer.learner.policy_scorer import PolicyScorer

    name, longest = model.name, model.context_token_count
    teacher = config.teachers[name]

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
        hint = f"; teachers.{name}.engine=sglang serves other models" if isinstance(error, ConfigError) else ""
        raise ConfigError(f"teachers.{name}.model={teacher.model}: {problem}{hint}") from error
    return EmbeddedEngine(scorer, teacher.tokens_per_microbatch)
