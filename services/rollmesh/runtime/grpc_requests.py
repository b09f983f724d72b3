"""Requests that a gRPC service cannot use: one status and at most one log line a second each."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from rollmesh.runtime.logging import get_logger

_LINE_SECONDS = 1.0
"""Refused requests of one method and status share a line in this time."""

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request whose bytes are not a message of the expected type."""

    error: str


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Answers malformed bytes with INVALID_ARGUMENT and unexpected errors of a handler with INTERNAL.

    gRPC itself answers both with UNKNOWN and writes a traceback for each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._log = get_logger("grpc")
        self._lines: dict[tuple[str, str], tuple[float, int]] = {}
        """Time of the newest line and requests since then, by method and status."""

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming or handler.request_deserializer is None:
            return handler
        codecs = {
            "request_deserializer": _tolerant(handler.request_deserializer),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            return grpc.unary_stream_rpc_method_handler(self._streaming(method, handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), **codecs)

    def _unary(self, method: str, handle: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            try:
                await _check(request, context)
                return await handle(request, context)
            except Exception as error:
                await self._refused(method, error, context)

        return answer

    def _streaming(self, method: str, handle: Callable[[Any, Context], AsyncGenerator[Any]]) -> Any:
        async def answer(request: Any, context: Context) -> AsyncGenerator[Any]:
            try:
                await _check(request, context)
                async with aclosing(handle(request, context)) as responses:
                    async for response in responses:
                        yield response
            except Exception as error:
                await self._refused(method, error, context)

        return answer

    async def _refused(self, method: str, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._line("request_refused", method, "INVALID_ARGUMENT", context.details(), None)
            raise error
        self._line("request_failed", method, "INTERNAL", repr(error), error)
        await context.abort(grpc.StatusCode.INTERNAL, "an error inside the service; its log has the traceback")

    def _line(self, event: str, method: str, status: str, message: str, error: Exception | None) -> None:
        now = self._clock()
        written, suppressed = self._lines.get((method, status), (-_LINE_SECONDS, 0))
        if now - written < _LINE_SECONDS:
            self._lines[method, status] = (written, suppressed + 1)
            return
        self._lines[method, status] = (now, 0)
        self._log.warning(
            event, method=method, status=status, message=message[:500], suppressed=suppressed, exc_info=error
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:  # protobuf's DecodeError; the codec of another message type may raise its own
            return _Malformed(f"{type(error).__name__}: {error}")

    return decode


async def _check(request: Any, context: Context) -> None:
    if isinstance(request, _Malformed):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {request.error}")
