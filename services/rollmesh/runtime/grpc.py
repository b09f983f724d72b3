"""gRPC servers and channels of the mesh: limits, keepalive, health service, and hooks for identity and traces.

Every call has ``traceparent`` metadata (W3C) and, when a token is configured, ``authorization: Bearer ...``.
"""

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from rollmesh.runtime.logging import LineLimit, get_logger
from rollmesh.runtime.port_security import OPEN, PortSecurity, Tokens

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message in both directions; a 64k-token trajectory with logprobs is under 1 MB."""
MOST_DETAIL_CHARACTERS = 1000
"""Maximum length of status details; gRPC clients reject an answer with over 16 KiB of metadata and lose its code."""

_OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.so_reuseport", 0),
    # HTTP proxies of the environment are ignored, as by the HTTP clients: they do not lead to the services of a mesh.
    ("grpc.enable_http_proxy", 0),
    # Same as HEAD_SECONDS of HTTP; the default is two minutes.
    ("grpc.server_handshake_timeout_ms", 30_000),
    # The default maximum is two minutes, during which a restarted service would look unreachable.
    ("grpc.initial_reconnect_backoff_ms", 200),
    ("grpc.max_reconnect_backoff_ms", 2_000),
]


Context = grpc.aio.ServicerContext[Any, Any]


class BearerTokenInterceptor(grpc.aio.ServerInterceptor):
    """Interceptor that rejects calls without an accepted bearer token; the health service stays open for probes."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    async def intercept_service(self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any) -> Any:
        if handler_call_details.method.startswith("/grpc.health."):
            return await continuation(handler_call_details)
        metadata = dict(handler_call_details.invocation_metadata)
        refusal = self._tokens.refusal(str(metadata.get("authorization", "")))
        if not refusal:
            return await continuation(handler_call_details)

        async def refuse(_request: Any, context: Context) -> Any:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, refusal)

        return grpc.unary_unary_rpc_method_handler(refuse)


class HealthReporter:
    """Status of the grpc.health.v1 service of one server."""

    def __init__(self, server: grpc.aio.Server, service_name: str) -> None:
        self._servicer = health.aio.HealthServicer()
        self._service_name = service_name
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)

    async def set_serving(self, serving: bool) -> None:
        """Report SERVING or NOT_SERVING for the server and its service."""
        state = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ("", self._service_name):
            await self._servicer.set(name, state)


def create_server(security: PortSecurity = OPEN) -> grpc.aio.Server:
    """Create a server with the mesh's limits.

    The caller adds servicers, opens a port with ``security.bind`` and starts the server.
    """
    hooks = [BearerTokenInterceptor(security.tokens)] if security.tokens is not None else []
    return grpc.aio.server(interceptors=[*hooks, RequestInterceptor()], options=_OPTIONS)


def create_channel(address: str, security: PortSecurity = OPEN) -> grpc.aio.Channel:
    """Create a channel with the mesh's limits; with TLS it keeps the current certificates."""
    if security.tls is None:
        return grpc.aio.insecure_channel(address, options=_OPTIONS)
    name = ("grpc.ssl_target_name_override", security.tls.server_name)
    return grpc.aio.secure_channel(address, security.tls.channel_credentials(), options=[*_OPTIONS, name])


def call_metadata(*, traceparent: str = "", token: str | None = None) -> tuple[tuple[str, str], ...]:
    """Return the metadata of one call."""
    pairs = (("traceparent", traceparent), ("authorization", f"Bearer {token}" if token else ""))
    return tuple(pair for pair in pairs if pair[1])


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

        def decode(data: bytes) -> Any:
            try:
                return handler.request_deserializer(data)
            except Exception as error:  # protobuf's DecodeError; codecs of other message types may raise other errors
                return _Malformed(f"{type(error).__name__}: {error}")

        codecs = {
            "request_deserializer": decode if handler.request_deserializer is not None else None,
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
                await self._failed(method, error, context)

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
                await self._failed(method, error, context)

        return answer

    def _note(self, method: str, context: Context) -> None:
        """Log a rejection, which the handler has raised or set as its status."""
        if context.code() is grpc.StatusCode.INVALID_ARGUMENT:
            self._line("request_refused", method, "INVALID_ARGUMENT", context.details(), None)

    async def _failed(self, method: str, error: Exception, context: Context) -> NoReturn:
        if isinstance(error, grpc.aio.AbortError):
            self._note(method, context)
            raise error
        if isinstance(error, grpc.aio.InternalError):
            raise error  # the client has disconnected before the answer was sent; gRPC ignores this
        self._line("request_failed", method, "INTERNAL", repr(error), error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error: see the traceback in the log of the service")

    def _line(self, event: str, method: str, status: str, message: str, error: Exception | None) -> None:
        if (suppressed := self._limit.suppressed((method, status))) is not None:
            names = {"method": method, "status": status, "message": message[:500], "suppressed": suppressed}
            self._log.warning(event, **names, exc_info=error)


async def _check(request: Any, context: Context) -> None:
    if isinstance(request, _Malformed):
        await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"the request is malformed: {request.error}")
