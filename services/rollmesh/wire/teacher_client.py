"""Client of TeacherService."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cached_property

import grpc.aio
import numpy as np

from rollmesh.config import RunConfig
from rollmesh.config.recipes import resolve_model
from rollmesh.config.teachers import teacher_service
from rollmesh.errors import DataError, NoTeacherScores, TeacherUnavailable
from rollmesh.runtime.health import Waits
from rollmesh.runtime.port_security import OPEN, PortSecurity
from rollmesh.text import Tokenizer
from rollmesh.types import TeacherColumn, Trajectory
from rollmesh.v1 import teacher_service_pb2 as pb
from rollmesh.v1 import teacher_service_pb2_grpc as stubs
from rollmesh.wire.codec import teacher_from_pb, tensor_to_pb
from rollmesh.wire.scoring_client import OpenCall, ScoringClient
from rollmesh.wire.service_addresses import Addresses, service_addresses
from rollmesh.wire.teacher_checks import check_teacher


class TeacherClient(ScoringClient[pb.TokenScoreItem, TeacherColumn]):
    """Client of the services of one teacher."""

    unavailable, timed_out = TeacherUnavailable, NoTeacherScores

    def __init__(
        self,
        config: RunConfig,
        name: str,
        *,
        addresses: Addresses | None = None,
        security: PortSecurity = OPEN,
        waits: Waits | None = None,
    ) -> None:
        """``name``: of the teacher in the run file, which also gives the addresses unless they are passed."""
        self.name, self.config, self._temperature = name, config.teachers[name], config.rollout.temperature
        self._run = config
        section = f"teachers.{name}"
        addresses = addresses or service_addresses(config, section, self.config.address, teacher_service(name))
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
