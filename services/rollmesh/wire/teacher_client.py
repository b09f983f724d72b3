"""Client of TeacherService, and the rules that a teacher of a run keeps, whoever serves it."""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property

import grpc.aio
import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import ConfigError, DataError, NoTeacherScores, TeacherUnavailable
from rollmesh.runtime.endpoints import service_addresses
from rollmesh.runtime.grpc import MAX_MESSAGE_BYTES
from rollmesh.runtime.health import Waits
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.text import Tokenizer
from rollmesh.types import TeacherColumn, Trajectory
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import teacher_from_pb, tensor_to_pb
from rollmesh.wire.scoring_client import OpenCall, ScoringClient

_LOGPROB_BYTES, _TOP_BYTES = 4, 8


def check_teacher(
    config: RunConfig, name: str, vocabulary_digest: str, context_token_count: float, policy_vocabulary_digest: str
) -> None:
    """Raise ConfigError for a teacher of another vocabulary or with a shorter context than the run."""
    place = teacher_place(config, name)
    if vocabulary_digest != policy_vocabulary_digest:
        raise ConfigError(
            f"{place}: another tokenizer than that of model.path={config.model.path} (vocabulary digests "
            f"{vocabulary_digest[:12]} and {policy_vocabulary_digest[:12]}), so that its log-probabilities are those "
            "of other tokens; use a teacher of the policy's model family, or start from a model of the teacher's"
        )
    longest = config.generator.max_context_tokens
    if context_token_count < longest:
        raise ConfigError(
            f"{place}: its context has {context_token_count} tokens, fewer than generator.max_context_tokens="
            f"{longest}; lower that, or use a teacher with a longer context"
        )
    top_k = config.teachers[name].top_k
    most = (MAX_MESSAGE_BYTES // longest - _LOGPROB_BYTES) // _TOP_BYTES
    if top_k > most:
        raise ConfigError(
            f"teachers.{name}.top_k={top_k}: with generator.max_context_tokens={longest} the scores of a trajectory "
            f"exceed a message of {MAX_MESSAGE_BYTES >> 20} MiB; set at most {most}"
        )


def teacher_place(config: RunConfig, name: str) -> str:
    """Return the field that says where a teacher is, with its value."""
    teacher = config.teachers[name]
    field = "model" if teacher.address is None else "address"
    return f"teachers.{name}.{field}={getattr(teacher, field)}"


class TeacherClient(ScoringClient[pb.TokenScoreItem, TeacherColumn]):
    """Client of the services of one teacher."""

    unavailable, timed_out = TeacherUnavailable, NoTeacherScores

    def __init__(
        self,
        config: RunConfig,
        name: str,
        *,
        security: PortSecurity = OPEN,
        waits: Waits | None = None,
    ) -> None:
        """``name``: of the teacher in the run file, which gives its addresses."""
        self.name, self.config, self._temperature = name, config.teachers[name], config.rollout.temperature
        self._run = config
        section = f"teachers.{name}"
        addresses = service_addresses(config, section, self.config.address, teacher_service(name))
        super().__init__(section, addresses, security, self.config.timeout_seconds, waits)

    async def score(self, trajectory: Trajectory) -> TeacherColumn:
        """Score the response of a finished trajectory.

        Raises NoTeacherScores if the teacher cannot score it, or not within its time limit, and TeacherUnavailable if
        no service is reached until then.
        """
        item = pb.TokenScoreItem(
            trajectory_id=trajectory.trajectory_id,
            token_ids=tensor_to_pb(np.concatenate([trajectory.prompt.token_ids, trajectory.response_ids])),
            prompt_token_count=len(trajectory.prompt.token_ids),
            traceparent=trajectory.traceparent,
        )
        (column,) = await self._score([(item, trajectory.traceparent)])
        # Its services may belong to another run: its file has another name for it, its policy perhaps more padding ids.
        if self.config.address is not None and column.top_ids is not None:
            try:
                self._policy.check_range(column.top_ids.ravel())
            except DataError as error:
                raise NoTeacherScores(f"{self._name}: most likely tokens: {error}") from error
        return replace(column, teacher=self.name)

    def _open(self, channel: grpc.aio.Channel) -> OpenCall[pb.TokenScoreItem]:
        stub = stubs.TeacherServiceStub(channel)  # type: ignore[no-untyped-call]
        return lambda items, timeout, metadata: stub.ScoreTokens(
            pb.ScoreTokensRequest(items=items, temperature=self._temperature, top_k=self.config.top_k),
            timeout=timeout,
            metadata=metadata,
        )

    async def _check(self, channel: grpc.aio.Channel, timeout: float, metadata: tuple[tuple[str, str], ...]) -> None:
        """Raise ConfigError for services at an address that do not fit this run; those of its folder check it."""
        if self.config.address is None:
            return
        stub = stubs.TeacherServiceStub(channel)  # type: ignore[no-untyped-call]
        found = await stub.DescribeTeacher(pb.DescribeTeacherRequest(), timeout=timeout, metadata=metadata)
        policy = await asyncio.to_thread(lambda: self._policy.vocabulary_digest)
        check_teacher(self._run, self.name, found.vocabulary_digest, found.context_token_count, policy)

    @cached_property
    def _policy(self) -> Tokenizer:
        return Tokenizer(resolve_model(self._run.model.path))

    def _result(self, response: pb.ScoreTokensResponse) -> TeacherColumn:
        if not response.HasField("column"):
            raise NoTeacherScores(f"{self._name}: {response.message or 'no scores, and no reason'}")
        return teacher_from_pb(response.column)


async def open_teachers(
    config: RunConfig, stack: AsyncExitStack, security: PortSecurity, waits: Waits
) -> dict[str, TeacherClient]:
    """Open the client of every teacher of a run, by name; ``stack`` closes them."""
    return {
        name: await stack.enter_async_context(TeacherClient(config, name, security=security, waits=waits))
        for name in config.teachers
    }
