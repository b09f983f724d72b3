"""Handling of invalid gRPC requests: one status each, and at most one log line per second."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio

from rollmesh.runtime.logging import LineLimit, get_logger

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Placeholder for a request whose bytes are not a message of the expected type."""

    error: str


class RequestInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that answers malformed bytes with INVALID_ARGUMENT and unexpected handler errors with INTERNAL.

    Without it, gRPC answers both with UNKNOWN and writes a traceback for each.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = LineLimit(clock)
        self._log = get_logger("grpc")

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None or handler.request_streaming:
            return handler
        decode = handler.request_deserializer
        codecs = {
            "request_deserializer": None if decode is None else _tolerant(decode),
            "response_serializer": handler.response_serializer,
        }
        if handler.response_streaming:
            # The handlers of the health service write their responses to the context.
            wrap = self._unary if method.startswith("/grpc.health.") else self._streaming
            return grpc.unary_stream_rpc_method_handler(wrap(method, handler.unary_stream), **codecs)
        return grpc.unary_unary_rpc_method_handler(self._unary(method, handler.unary_unary), **codecs)

    def _unary(self, method: str, handle: Callable[[Any, Context], Awaitable[Any]]) -> Any:
        async def answer(request: Any, context: Context) -> Any:
            try:
                await _check(request, context)
                response = await handle(request, context)
                self._note(method, context)
                return response
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
                self._note(method, context)
            except Exception as error:
                await self._refused(method, error, context)

        return answer

    def _note(self, method: str, context: Context) -> None:
        """Log a rejection that the handler set as its status without an exception."""
        if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
            self._line("request_refused", method, "INVALID_ARGUMENT", context.details(), None)

    async def _refused(self, method: str, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
                self._line("request_refused", method, "INVALID_ARGUMENT", context.details(), None)
            raise error
        if isinstance(error, grpc.aio.InternalError):
            raise error  # the client has disconnected before the answer was sent; gRPC ignores this
        self._line("request_failed", method, "INTERNAL", repr(error), error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the traceback in the log of the service")

    def _line(self, event: str, method: str, status: str, message: str, error: Exception | None) -> None:
        suppressed = self._limit.suppressed((method, status))
        if suppressed is None:
            return
        self._log.warning(
            event, method=method, status=status, message=message[:500], suppressed=suppressed, exc_info=error
        )


def _tolerant(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode(data: bytes) -> Any:
        try:
            return deserialize(data)
        except Exception as error:  # protobuf's DecodeError; codecs of other message types may raise other errors
            return _Malformed(f"{type(error).__name__}: {error}")

    return decode


async def _check(request: Any, context: Context) -> None:
    if isinstance(request, _Malformed):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {request.error}")
