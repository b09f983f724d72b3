"""A teacher over real gRPC whose scores a test can work out, and which errs when told to."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.runtime.grpc import create_server
from rollmesh.text import Tokenizer
from rollmesh.types import Float32Array, TeacherColumn
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import ids_from_pb, teacher_to_pb
from rollmesh.wire.teacher_client import TeacherClient

DIGEST = "ab" * 32
MODEL = "recipe:countdown"


def known_logprobs(token_ids: Float32Array, temperature: float = 1.0) -> Float32Array:
    """Log-probabilities of a response: they depend on each token and on its place."""
    return (-(token_ids % 7 + 1 + np.arange(len(token_ids)) / 64) / temperature).astype(np.float32)


@dataclass
class KnownTeacher(stubs.TeacherServiceServicer):
    """A teacher service; ``change`` alters the scores of a trajectory, or returns a reason in words instead."""

    digest: str = DIGEST
    change: Callable[[str, TeacherColumn], TeacherColumn | str | None] = lambda _, column: column
    """None: the service is silent about it."""
    vocabulary: str = field(default_factory=lambda: Tokenizer(resolve_model(MODEL)).vocabulary_digest)
    context: int = 1 << 20
    calls: list[str] = field(default_factory=list)
    """Trajectories in the order of their arrival."""

    async def ScoreTokens(self, request: pb.ScoreTokensRequest, context: Any) -> AsyncIterator[pb.ScoreTokensResponse]:
        silent = False
        for index, item in enumerate(request.items):
            self.calls.append(item.trajectory_id)
            ids = ids_from_pb(item.token_ids, "token_ids")[item.prompt_token_count :]
            scores = self.change(item.trajectory_id, self._column(ids, request.temperature, request.top_k))
            if scores is None:
                silent = True
            elif isinstance(scores, str):
                yield pb.ScoreTokensResponse(item_index=index, message=scores)
            else:
                yield pb.ScoreTokensResponse(item_index=index, column=teacher_to_pb(scores))
        if silent:
            await asyncio.Event().wait()

    async def DescribeTeacher(self, request: pb.DescribeTeacherRequest, context: Any) -> pb.DescribeTeacherResponse:
        return pb.DescribeTeacherResponse(
            teacher="of another run",
            manifest_digest=self.digest,
            vocabulary_digest=self.vocabulary,
            context_token_count=self.context,
        )

    def _column(self, ids: Float32Array, temperature: float, top_k: int) -> TeacherColumn:
        logprobs = known_logprobs(ids, temperature)
        column = TeacherColumn(teacher="of another run", manifest_digest=self.digest, logprobs=logprobs)
        if not top_k:
            return column
        steps = np.arange(top_k)
        return replace(
            column,
            top_ids=(ids[:, None] + steps).astype(np.int32),
            top_logprobs=(logprobs[:, None] - steps).astype(np.float32),
        )


@asynccontextmanager
async def served(service: KnownTeacher, port: int = 0) -> AsyncIterator[str]:
    """Serve a teacher; yields its host:port."""
    server = create_server()
    stubs.add_TeacherServiceServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    address = f"127.0.0.1:{server.add_insecure_port(f'127.0.0.1:{port}')}"
    await server.start()
    try:
        yield address
    finally:
        await server.stop(None)


def taught_run(folder: Path, teachers: Mapping[str, Mapping[str, Any]], temperature: float = 1.0) -> RunConfig:
    """Return a run with these teachers, whose rows name their domains."""
    return RunConfig.model_validate(
        {
            "name": "taught",
            "folder": str(folder),
            "model": {"path": MODEL},
            "data": {"source": {"type": "jsonl", "path": "rows.jsonl"}, "domain_field": "domain"},
            "rollout": {"temperature": temperature},
            "teachers": teachers,
            "trainer": {"algorithm": {"teacher": {"reverse_kl_coefficient": 1.0}}},
            "schedule": {"filter_zero_variance": False},
        }
    )


@asynccontextmanager
async def taught_by(
    folder: Path, services: Mapping[str, KnownTeacher], temperature: float = 1.0, **settings: Mapping[str, Any]
) -> AsyncIterator[dict[str, TeacherClient]]:
    """Serve teachers and yield their clients; ``settings``: sections of the teachers by name."""
    async with AsyncExitStack() as stack:
        addresses = {name: await stack.enter_async_context(served(service)) for name, service in services.items()}
        sections = {name: {"address": address, **settings.get(name, {})} for name, address in addresses.items()}
        config = taught_run(folder, sections, temperature)
        yield {name: await stack.enter_async_context(TeacherClient(config, name)) for name in services}
