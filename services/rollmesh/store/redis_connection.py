"""Connection pool to Redis: server checks, retries with back-off, scripts by digest, errors of ``errors.py``.

Every script is idempotent, so a call without an answer is sent again.
"""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, cast

import hiredis
import redis.asyncio as aioredis
from redis import exceptions as redis_errors
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from rollmesh.errors import StoreError, StoreUnavailable
from rollmesh.runtime.health import Waits
from rollmesh.runtime.logging import get_logger
from rollmesh.runtime.metrics import LATENCY_BUCKETS, Metrics
from rollmesh.runtime.tasks import Backoff
from rollmesh.store.redis_client import tls_failure
from rollmesh.store.scripts import (
    Keys,
    RunUnknown,
    cannot_write,
    is_no_master,
    load_scripts,
    refuses_credentials,
    store_error,
)

Argument = str | bytes | int | float
Reply = Any

_UNREACHABLE = (redis_errors.ConnectionError, redis_errors.TimeoutError, OSError)
_MINIMUM_VERSION = (7, 0)
_BACKOFF = Backoff(first_seconds=0.02, longest_seconds=1.0)
_LATE_SECONDS = 2.0
"""Time without an answer that shows among the waits of the process."""
_CALL_SECONDS = 15.0
"""Time limit of one attempt; redis-py closes the connection of a call that is cancelled while in progress."""
_LONGEST_BLOCK_SECONDS = 5.0
_SIGNS_OF_A_CUT = ("Connection lost", "closed by server", "reset by peer", "Broken pipe")
_CUT_OFF = "(so does a server that ends, or one at its maxclients, whose own message is lost at times)"
_MOST_IDLE = 32
"""Idle connections kept for scripts, below the 100 of the pool: plain commands take theirs from the pool."""
_BUCKETS = (0.00025, 0.0005, *LATENCY_BUCKETS)
_OPERATION = "Redis"


class Connection:
    """Executor of the scripts and commands of one run; shared by every part of the store."""

    def __init__(
        self, client: aioredis.Redis, run: str, retry_seconds: float = 20.0, observer: "StoreCallObserver | None" = None
    ) -> None:
        self.client = client
        self._observer = observer
        self.keys = Keys(run)
        self._scripts = load_scripts()
        self._retry_seconds = retry_seconds
        self._limits: Sequence[Argument] = ()
        """Arguments of ``init_run``; empty before ``restore_lost_run``."""
        self._idle: list[AbstractConnection] = []
        self._execute = cast("Callable[..., Awaitable[Reply]]", client.execute_command)

    @classmethod
    async def open(
        cls,
        client: aioredis.Redis,
        run: str,
        retry_seconds: float = 20.0,
        start_seconds: float | None = None,
        observer: "StoreCallObserver | None" = None,
    ) -> "Connection":
        """Connect and check the server's version and settings.

        Waits for the server up to ``start_seconds``, by default ``retry_seconds``.
        """
        connection = cls(client, run, retry_seconds if start_seconds is None else start_seconds, observer)
        try:
            await connection.check_server()
            await connection.commands([("SCRIPT", "LOAD", script.text) for script in connection._scripts.values()])
        except BaseException:
            await connection.aclose()
            raise
        connection._retry_seconds = retry_seconds
        return connection

    async def aclose(self) -> None:
        """Close the pool and its connections to the sentinels."""
        pool = self.client.connection_pool
        await self.client.aclose()
        await pool.disconnect()
        if isinstance(pool, SentinelConnectionPool):
            for sentinel in pool.sentinel_manager.sentinels:
                await sentinel.aclose()

    async def check_server(self) -> None:
        """Raise StoreUnavailable for a server that is too old or may evict keys; warn without AOF."""
        info = cast("dict[str, Any]", await self.command("INFO"))
        check_version(str(info.get("redis_version", "")))
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy != "noeviction":
            raise StoreUnavailable(
                f"Redis has maxmemory-policy {policy}, which may evict keys of the queue: set it to noeviction"
            )
        if not int(info.get("aof_enabled", 0)):
            get_logger("store").warning(
                "redis_without_aof", consequence="a restart of Redis falls back to its last snapshot"
            )

    async def run(self, name: str, *arguments: Argument) -> Reply:
        """Run one script; raises the errors of ``errors.py``."""
        try:
            return await self._run(name, *arguments)
        except RunUnknown:
            # Redis came back empty: restore the limits of the run, if this client has them.
            if not self._limits:
                raise
            await self._run("init_run", 1, *self._limits)
            return await self._run(name, *arguments)

    async def run_named(self, name: str, *arguments: Argument) -> dict[str, Reply]:
        """Run a script that replies with a map; returns its values by name."""
        reply = await self.run(name, *arguments)
        return {key.decode(): value for key, value in reply.items()}

    def restore_lost_run(self, limits: Sequence[Argument]) -> None:
        """Send these arguments of ``init_run`` again whenever Redis comes back without the run."""
        self._limits = limits

    async def _run(self, name: str, *arguments: Argument) -> Reply:
        script = self._scripts[name]

        async def call() -> Reply:
            try:
                return (await self._exchange((("EVALSHA", script.sha, 1, self.keys.prefix, *arguments),)))[0]
            except redis_errors.NoScriptError:
                return (await self._exchange((("EVAL", script.text, 1, self.keys.prefix, *arguments),)))[0]

        return await self._retrying(call, name, self._observer)

    async def command(self, *arguments: Argument) -> Reply:
        call = functools.partial(self._execute, *arguments)
        return await self._retrying(call, str(arguments[0]), self._observer)

    async def commands(self, commands: Sequence[Sequence[Argument]], label: str = "") -> list[Reply]:
        """Run plain commands in one round trip; ``label`` begins the error messages."""
        if not commands:
            return []

        async def call() -> list[Reply]:
            return await self._exchange(commands)

        replies = await self._retrying(call, label or str(commands[0][0]), self._observer)
        return cast("list[Reply]", replies)

    async def _exchange(self, commands: Sequence[Sequence[Argument]]) -> list[Reply]:
        """Send commands packed by hiredis and read their raw replies (RESP 3).

        This is the hot path: the method of redis-py spends several times as long on packing, hooks and callbacks.
        """
        packed = b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]
        connection = await self._checkout()
        try:
            await connection.send_packed_command(packed, check_health=False)
            replies: list[Reply] = []
            refusal: redis_errors.ResponseError | None = None
            for _ in commands:
                try:
                    replies.append(await connection.read_response())
                except redis_errors.ResponseError as error:
                    refusal = refusal or error
        except BaseException:
            # The idle ones too: their server is probably down.
            await asyncio.shield(self._disconnect_idle(connection))
            raise
        if len(self._idle) < _MOST_IDLE:
            self._idle.append(connection)
        else:
            await self._release(connection)
        if refusal is not None:
            raise refusal
        return replies

    async def _checkout(self) -> AbstractConnection:
        """Return an idle connection; the pool's own check-out tests the socket on every call."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_connected:
                return connection
            await self._release(connection)
        connection = await self.client.connection_pool.get_connection()  # type: ignore[no-untyped-call]
        return cast("AbstractConnection", connection)

    async def _release(self, connection: AbstractConnection) -> None:
        """Return a connection to the pool; a caller that is cancelled meanwhile leaks none."""
        await asyncio.shield(self.client.connection_pool.release(connection))

    async def _disconnect_idle(self, *others: AbstractConnection) -> None:
        """Close all idle connections, and ``others``.

        The pool's own ``disconnect`` waits for each, and another task may take one meanwhile.
        """
        pool = self.client.connection_pool
        idle, self._idle = self._idle, []
        for each in (*others, *idle):
            await each.disconnect(nowait=True)
            await pool.release(each)
        for each in tuple(pool._available_connections):
            await each.disconnect(nowait=True)

    async def block_on_stream(self, stream: str, after: str, timeout: float) -> bool:
        """Wait until a stream has an entry after an id; False after ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            # Below the time limit of one attempt, so that a lost connection is noticed.
            milliseconds = max(1, int(1000 * min(left, _LONGEST_BLOCK_SECONDS)))
            words = ("XREAD", "COUNT", 1, "BLOCK", milliseconds, "STREAMS", stream, after)
            # Not observed: it blocks on purpose.
            if await self._retrying(functools.partial(self._execute, *words), "XREAD", observer=None):
                return True
            if time.monotonic() >= deadline:
                return False

    async def _retrying(
        self, call: Callable[[], Awaitable[Reply]], label: str, observer: "StoreCallObserver | None"
    ) -> Reply:
        start = time.monotonic()
        deadline = start + self._retry_seconds
        failure_count = 0
        while True:
            try:
                reply = await _answer(call, observer)
                if observer is not None:
                    observer.answered(time.monotonic() - start)
                return reply
            except (redis_errors.RedisError, OSError) as error:
                failure = _failure(error, label)
                # A rejection by a script is an answer; a server that is full or cannot write is a failure.
                if observer is not None and (failure is None or isinstance(failure, StoreUnavailable)):
                    observer.failed(_reason(failure or error))
                if failure is None or cannot_write(error):
                    # Connections may stay open after a failover: only a new one resolves the address again.
                    await self._disconnect_idle()
                if failure is not None:
                    raise failure from error
                failure_count += 1
                delay = _BACKOFF.seconds(failure_count)
                if time.monotonic() + delay > deadline:
                    if is_no_master(error) and isinstance(error, redis_errors.RedisError):
                        raise store_error(error, label) from error
                    raise StoreUnavailable(
                        f"{label}: Redis was unreachable for {self._retry_seconds:g} s: {_reason(error)}"
                    ) from error
            await asyncio.sleep(delay)


async def _answer(call: Callable[[], Awaitable[Reply]], observer: "StoreCallObserver | None") -> Reply:
    """Make one attempt, which shows while it is late."""
    late = observer and asyncio.get_running_loop().call_later(
        _LATE_SECONDS, observer.late, f"no answer within {_LATE_SECONDS:g} s"
    )
    try:
        async with asyncio.timeout(_CALL_SECONDS):
            return await call()
    finally:
        if late:
            late.cancel()


def _failure(error: redis_errors.RedisError | OSError, label: str) -> StoreError | None:
    """Return the error to raise at once; None if the same call may succeed over a new connection."""
    if isinstance(error, redis_errors.RedisError) and refuses_credentials(error):
        return store_error(error, label)
    if isinstance(error, _UNREACHABLE):
        failure = tls_failure(error)
        return None if failure is None else StoreUnavailable(f"{label}: {failure}")
    return None if is_no_master(error) else store_error(error, label)


def _reason(error: BaseException) -> str:
    """Return the text of an error; the time-out of ``asyncio.timeout`` has none."""
    if isinstance(error, TimeoutError) and not str(error):
        return f"no answer within {_CALL_SECONDS:g} s"
    text = str(error) or type(error).__name__
    return f"{text} {_CUT_OFF}" if any(sign in text for sign in _SIGNS_OF_A_CUT) else text


def check_version(version: str) -> None:
    """Raise StoreUnavailable for a Redis below 7.0; ``version`` is redis_version of INFO, which Valkey reports too."""
    try:
        numbers = tuple(int(part) for part in version.split(".")[:2])
    except ValueError as error:
        raise StoreUnavailable(f"Redis reports version {version!r}, which is not a version number") from error
    if numbers < _MINIMUM_VERSION:
        raise StoreUnavailable(f"Redis {version} is too old: install Redis >= 7.0 or Valkey")


class StoreCallObserver:
    """Shows the last error of Redis among the waits of the process, until Redis answers, and counts store calls."""

    def __init__(self, waits: Waits, metrics: Metrics | None = None) -> None:
        """Register the metrics of a service; none without ``metrics``."""
        self._waits = waits
        self._seconds, self._failures = None, None
        if metrics is not None:
            service = metrics.component
            self._seconds = metrics.histogram(
                f"rollmesh_{service}_store_call_seconds", "Duration of store calls, retries included.", _BUCKETS
            )
            self._failures = metrics.counter(
                f"rollmesh_{service}_store_call_failures_total",
                "Attempts of store calls that got no answer or that the server could not execute.",
            )

    def answered(self, seconds: float) -> None:
        """Record an answered call and its duration, failed attempts included."""
        self._waits.end(_OPERATION)
        if self._seconds is not None:
            self._seconds.observe(seconds)

    def late(self, reason: str) -> None:
        """Show an attempt that has no answer yet."""
        self._waits.begin(_OPERATION, f"Redis: {reason}")

    def failed(self, reason: str) -> None:
        """Record an attempt without an answer, or one that the server could not execute."""
        self.late(reason)
        if self._failures is not None:
            self._failures.inc()
