"""Tracing span of one generation call: the time of its first token and its policy versions."""

from __future__ import annotations

from typing import Any

import grpc.aio

from rollmesh.runtime.tracing import tracer
from rollmesh.types import Chunk
from rollmesh.v1 import generation_service_pb2 as pb

_FAILED = frozenset({"failed", "invalid"})


class CallTrace:
    """Span of one call. Its events are ``prefilled`` at the first token and ``segment`` at each change of version."""

    def __init__(self, traceparent: str, trajectory_id: str, context_tokens: int) -> None:
        self._span = tracer().span(
            "generate", traceparent, kind="server", trajectory=trajectory_id, context_tokens=context_tokens
        )
        self._tokens = 0
        self._versions: list[int] = []
        self._kv_min_version: int | None = None

    @classmethod
    def of(cls, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> CallTrace:
        """Open the span of a call that has just arrived, in the trace of its caller."""
        traceparent = _metadata(context.invocation_metadata() or (), "traceparent")
        return cls(traceparent, request.trajectory_id, len(request.context_ids.data) // 4)

    def chunk(self, chunk: Chunk) -> None:
        """Record the tokens of a chunk."""
        if not len(chunk.token_ids):
            return
        if not self._tokens:
            self._span.event("prefilled", cached_tokens=chunk.cached_token_count)
        if self._versions[-1:] != [chunk.policy_version] or self._kv_min_version != chunk.kv_min_version:
            self._span.event(
                "segment",
                policy_version=chunk.policy_version,
                kv_min_version=chunk.kv_min_version,
                first_token=self._tokens,
            )
            if self._versions[-1:] != [chunk.policy_version]:
                self._versions.append(chunk.policy_version)
            self._kv_min_version = chunk.kv_min_version
        self._tokens += len(chunk.token_ids)

    def end(self, ended: str) -> None:
        """End the span; ``ended`` is the end reason as in ``generator_metrics.CALL_ENDS``."""
        self._span.set(tokens=self._tokens, policy_versions=self._versions, ended=ended)
        if ended in _FAILED:
            self._span.fail(ended)
        self._span.end()


def _metadata(pairs: Any, key: str) -> str:
    return next((str(value) for name, value in pairs if name == key), "")
