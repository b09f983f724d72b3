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

    def __init__(self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        """Open the span of a call that has just arrived, in the trace of its caller."""
        metadata: dict[str, Any] = dict(context.invocation_metadata() or ())
        self._span = tracer().span(
            "generate",
            str(metadata.get("traceparent", "")),
            kind="server",
            trajectory=request.trajectory_id,
            context_tokens=len(request.context_ids.data) // 4,
        )
        self._tokens = 0
        self._policy_versions: list[int] = []
        self._segment: dict[str, int] = {}

    def chunk(self, chunk: Chunk) -> None:
        """Record the tokens of a chunk."""
        if not len(chunk.token_ids):
            return
        if not self._tokens:
            self._span.event("prefilled", cached_tokens=chunk.cached_token_count)
        versions = {"policy_version": chunk.policy_version, "kv_min_version": chunk.kv_min_version}
        if versions != self._segment:
            self._span.event("segment", **versions, first_token=self._tokens)
            if self._policy_versions[-1:] != [chunk.policy_version]:
                self._policy_versions.append(chunk.policy_version)
            self._segment = versions
        self._tokens += len(chunk.token_ids)

    def end(self, ended: str) -> None:
        """End the span; ``ended`` is the end reason as in ``generator_metrics.CALL_ENDS``."""
        self._span.set(tokens=self._tokens, policy_versions=self._policy_versions, ended=ended)
        if ended in _FAILED:
            self._span.fail(ended)
        self._span.end()
